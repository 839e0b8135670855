"""A setting exists only in the types in which it has an effect."""

import pytest

from configs.learner import (
    IcepopConfig,
    NoCorrectionConfig,
)
from configs.loading import RECIPES, ConfigError, load_run_config, render_config
from configs.reward import OutcomeConfig


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learner.correction.low=0.5", "type = 'tis' has 'max_weight', 'icepop' or 'sequence_reject' has it"),
        ("learner.loss.kl_weight=0.1", "type = 'dapo' has 'clip_low' and 'clip_high', 'flow_grpo' has it"),
        ("learner.overlong.cache_tokens=9", "type = 'none' has no settings, 'soft' has it"),
        ("agent.memory.in_evaluation=true", "type = 'none' has no settings, 'in_process', 'folder' or 'server' has it"),
        ("backend.base_url=here", "type = 'vllm' has no settings, 'ollama' or 'openai' has it"),
        ("agent.verifier.max_tokens=9", "type = 'rule' has no settings, 'model' has it"),
        ("label.judge=m", "type = 'plan' has no settings, 'judge' has it"),
        ("learner.loss.clip_lo=0.1", "; did you mean 'learner.loss.clip_low'?"),
    ],
)
def test_a_setting_without_effect_is_refused_and_the_types_that_have_it_are_named(override, says):
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, [override])
    assert str(caught.value).startswith(f"unknown key '{override.partition('=')[0]}'")
    assert says in str(caught.value)


def test_an_unknown_type_lists_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, ["learner.correction=icepopp"])
    assert str(caught.value) == (
        "learner.correction.type: must be 'tis', 'icepop', 'sequence_reject' or 'none' (got \"icepopp\"); did you mean "
        "'icepop'?"
    )


def test_a_type_may_be_written_alone_and_completed_by_overrides(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[learner]\ncorrection = "icepop"\n')
    assert load_run_config(recipe).learner.correction == IcepopConfig()
    config = load_run_config(recipe, ["learner.correction.low=0.7", "reward.credit=outcome"])
    assert config.learner.correction == IcepopConfig(low=0.7)
    assert config.reward.credit == OutcomeConfig()


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_rendered_recipe_loads_back(recipe, tmp_path):
    config = load_run_config(recipe)
    (tmp_path / "rendered.toml").write_text(render_config(config))
    assert load_run_config(tmp_path / "rendered.toml") == config


def test_misspelt_setting_of_another_type_is_told_the_nearest_one():
    with pytest.raises(ConfigError) as error:
        load_run_config(None, ["label.judge.price_per_million_iput_tokens=1"])
    assert "'judge' has it; did you mean 'label.judge.price_per_million_input_tokens'?" in str(error.value)
    with pytest.raises(ConfigError) as error:
        load_run_config(None, ["label.judge.price_per_million_input_tokens=1"])
    assert str(error.value).endswith("'judge' has it")


@pytest.mark.parametrize("loss", ["cispo", "gspo"])
def test_a_loss_that_bounds_the_ratio_itself_takes_no_correction_and_refuses_one(loss, tmp_path):
    assert load_run_config(None, [f"learner.loss={loss}"]).learner.correction == NoCorrectionConfig()
    assert load_run_config(None, [f"learner.loss.type={loss}"]).learner.correction == NoCorrectionConfig()
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, [f"learner.loss={loss}", "learner.correction=tis"])
    assert str(caught.value) == (
        f"recipe: learner.loss.type = '{loss}' bounds the ratio itself, and learner.correction.type = 'tis' would "
        "bound it a second time: set learner.correction=none"
    )


def test_dr_grpo_is_refused_with_advantages_that_are_divided_by_the_deviation():
    load_run_config(None, ["learner.loss=dr_grpo", "reward.credit=outcome_centered"])
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, ["learner.loss=dr_grpo", "reward.credit=outcome"])
    assert str(caught.value) == (
        "recipe: learner.loss.type = 'dr_grpo' needs reward.credit.type = 'outcome_centered', not 'outcome': its "
        "advantages are not divided by the group's deviation"
    )
