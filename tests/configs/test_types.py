"""A setting exists only in the types in which it has an effect; what earlier releases wrote means the same."""

import json

import pytest

from configs.learner import (
    DapoConfig,
    FlowGrpoConfig,
    GrpoConfig,
    IcepopConfig,
    NoCorrectionConfig,
    SoftOverlongConfig,
    TisConfig,
)
from configs.loading import RECIPES, ConfigError, load_run_config, render_config
from configs.reward import JudgeLabelConfig, MonteCarloLabelConfig, OutcomeConfig
from configs.rollout import FolderMemoryConfig, InProcessMemoryConfig, NoMemoryConfig, ServerMemoryConfig
from configs.run import RunConfig


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learner.correction.low=0.5", "type = 'tis' has 'max_weight', 'icepop' or 'sequence_reject' has it"),
        ("learner.loss.kl_weight=0.1", "type = 'dapo' has 'clip_low' and 'clip_high', 'flow_grpo' has it"),
        ("learner.overlong.cache_tokens=9", "type = 'none' has no settings, 'soft' has it"),
        ("memory.top_k=3", "type = 'none' has no settings, 'in_process', 'folder' or 'server' has it"),
        ("backend.base_url=here", "type = 'vllm' has no settings, 'ollama' or 'openai' has it"),
        ("rollout.verifier.max_tokens=9", "type = 'rule' has no settings, 'model' has it"),
        ("label.judge=m", "type = 'plan' has 'check_share' and 'continuations', 'judge' has it"),
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


BEFORE = """
[learner]
objective = "flow_grpo"
kl_weight = 0.01
clip_low = 0.1
overlong = "soft"
overlong_cache_tokens = 9
correction = { kind = "icepop", low = 0.6 }
[reward]
credit = "outcome"
[label]
labeller = "monte_carlo"
continuations = 7
"""


def test_a_recipe_of_before_means_the_same(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(BEFORE)
    config = load_run_config(recipe, ["learner.loss.kl_weight=0.02"])
    assert config.learner.loss == FlowGrpoConfig(clip=0.1, kl_weight=0.02)
    assert config.learner.overlong == SoftOverlongConfig(cache_tokens=9)
    assert config.learner.correction == IcepopConfig(low=0.6)
    assert config.label == MonteCarloLabelConfig(continuations=7)


def run_folder_of_before(**learner):
    """The settings that an earlier release kept, whatever had an effect."""
    values = load_run_config(None).model_dump(mode="json")
    for new in ("loss", "correction", "overlong"):
        del values["learner"][new]
    values["learner"] |= {
        "objective": "dapo",
        "kl_weight": 0.5,
        "clip_low": 0.1,
        "clip_high": 0.3,
        "correction": {"kind": "tis", "max_weight": 3.0, "low": 0.4, "high": 6.0},
        "overlong": "none",
        "overlong_cache_tokens": 9,
    } | learner
    values["reward"] = {"credit": "outcome", "prm_path": None, "prm_weight": 0.5, "alarms": {"window": 4}}
    values["label"] = {"labeller": "judge", "continuations": 4, "check_share": 0.1, "judge": {"model": "m"}}
    values["memory"] = {"enabled": False, "location": ":memory:", "api_key_env": None, "top_k": 3}
    served = {"kind": "vllm", "model": None, "base_url": None, "form": "json_schema", "keep_alive": "5m"}
    values["backend"] = served
    values["rollout"]["verifier"] = {"kind": "rule", "max_tokens": 64}
    return values


def test_the_run_folder_of_an_earlier_release_is_read_without_what_had_no_effect(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(run_folder_of_before()))
    config = load_run_config(path)
    assert config == RunConfig.model_validate_json(path.read_text())
    assert config.learner.loss == DapoConfig(clip_low=0.1, clip_high=0.3)
    assert config.learner.correction == TisConfig(max_weight=3.0)
    assert config.reward.credit == OutcomeConfig()
    assert isinstance(config.label, JudgeLabelConfig)
    assert (config.memory, config.backend.type) == (NoMemoryConfig(), "vllm")
    path.write_text(json.dumps(run_folder_of_before(objective="grpo")))
    assert load_run_config(path).learner.loss == GrpoConfig(clip=0.1)


@pytest.mark.parametrize(
    ("before", "today"),
    [
        ({"enabled": True, "location": ":memory:"}, InProcessMemoryConfig()),
        ({"enabled": True, "location": "there"}, FolderMemoryConfig(path="there")),
        ({"enabled": True, "location": "http://q:1"}, ServerMemoryConfig(url="http://q:1")),
        ({"enabled": False}, NoMemoryConfig()),
    ],
)
def test_a_memory_of_before_is_where_it_was(before, today):
    assert RunConfig.model_validate({"memory": before}).memory == today


def test_a_key_of_before_beside_the_one_that_replaced_it_is_refused():
    with pytest.raises(ConfigError, match=r"learner\.objective is now learner\.loss\.type, and both are set"):
        load_run_config(None, ["learner.objective=dapo", "learner.loss=grpo"])
    with pytest.raises(ConfigError, match=r"memory\.location is now memory\.type"):
        load_run_config(None, ["memory.location=there"])


def test_restarts_are_refused_beside_a_memory_whose_hints_change():
    with pytest.raises(ConfigError, match=r"restarts.type = 'random' needs memory.type = 'none', not 'in_process'"):
        load_run_config(None, ["rollout.restarts=random", "memory=in_process"])


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
