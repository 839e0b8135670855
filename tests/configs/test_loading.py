from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from configs.errors import did_you_mean
from configs.loading import RECIPES, ConfigError, load_run_config, render_config
from configs.run import RunConfig
from configs.wording import FORMS


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_loads_and_its_resolved_form_is_the_same_recipe(recipe, tmp_path):
    config = load_run_config(recipe)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(render_config(config))
    assert load_run_config(resolved) == config


@pytest.mark.parametrize(
    "override",
    ["learner.max_grad_norm=inf", 'envs.mix={"a.b/c d"=1}', 'output_dir="😀 \\"\\t\\u007f"', "envs.data_path=a#b"],
)
def test_rendered_configuration_loads_back_whatever_the_value(override, tmp_path):
    config = load_run_config(None, [override])
    (tmp_path / "rendered.toml").write_text(render_config(config))
    assert load_run_config(tmp_path / "rendered.toml") == config


def test_rendered_configuration_names_keys_that_are_not_set():
    assert "# data_path is not set\n" in render_config(load_run_config(None))


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    """Regression: a run with output_dir = "~/runs" went into a new folder named ~ where the command was called."""
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'output_dir = "~/runs"\nenvs = { data_path = "~/q.jsonl" }\nagent.memory = { path = "~/m", type = "folder" }'
    )
    config = load_run_config(recipe, ["envs.recording.path=~/r.jsonl", "reward.credit.prm_path=~/prm", "name=a"])
    assert config.run_path == tmp_path / "runs" / "a"
    found = (config.envs.data_path, config.planner.memory.path, config.envs.recording.path, config.reward.prm_path)
    assert found == tuple(str(tmp_path / name) for name in ("q.jsonl", "m", "r.jsonl", "prm"))
    with pytest.raises(ConfigError, match=r"memory\.path: "):
        load_run_config(None, ['agent.memory={type="folder", path=""}'])


def test_dotted_overrides_win_over_the_recipe_and_the_last_one_over_all(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("seed = 1\n[learner]\nlearning_rate = 1e-3\n")
    config = load_run_config(recipe, ["learner.learning_rate=2e-6", "seed=5", "seed=7", "name=mine"])
    assert (config.learner.learning_rate, config.seed, config.name) == (2e-6, 7, "mine")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sede=1", "unknown key 'sede'"),
        ("learner.lr=1", "unknown key 'learner.lr'"),
        ("learner.lerning_rate=1", "unknown key 'learner.lerning_rate'; did you mean 'learner.learning_rate'?"),
        ("learner.num_steps=1", "unknown key 'learner.num_steps'; did you mean 'num_steps'?"),
        ("xyzzy=1", "unknown key 'xyzzy'; `agentflow train --dry-run` prints every key that exists"),
        ("seed=abc", 'seed: must be a whole number (got "abc")'),
        ("seed.x=1", "seed: must be a whole number (got a table)"),
        ("learner=1", "learner: must be a table (got 1)"),
        (
            "learner.loss.type=x",
            "learner.loss.type: must be 'dapo', 'grpo', 'flow_grpo', 'cispo', 'gspo', 'dr_grpo' or 'custom' "
            '(got "x")',
        ),
        ('backend={type="openai", model="m", base_url="here"}', "must be an address such as http://127.0.0.1:8000/v1"),
        ("rollout.group_size=1", "rollout.group_size: must be at least 2 (got 1)"),
        ("learner.learning_rate=-1", "must be above 0 (got -1)"),
        ("learner.learning_rate=1e400", "learner.learning_rate: must be a finite number (got Infinity)"),
        ("rollout.engine.kv_cache_gib=inf", "rollout.engine.kv_cache_gib: must be a finite number"),
        ("evaluation.every_steps=true", 'evaluation.every_steps: must be a whole number (got "true")'),
        ("rollout.max_workers=true", 'rollout.max_workers: must be a whole number (got "true")'),
        ("learner.max_grad_norm=true", 'learner.max_grad_norm: must be a number (got "true")'),
        ("learner.max_grad_norm=false", 'learner.max_grad_norm: must be a number (got "false")'),
        ("envs.mix={lookup=true}", 'envs.mix.lookup: must be a number (got "true")'),
        ("name=true", "name: must be a text (got true)"),
        ("name=../elsewhere", "name: must be letters, digits"),
        ('envs.actions=["code"]', "actions must contain 'answer'"),
        ('envs.actions=["serach", "answer"]', "'serach' is not built in (think"),
        ('envs.actions=["base_generator", "answer"]', "needs envs.base_generator.base_url"),
        ("envs.tools.x.source=no_class", "envs.tools.x.source: must be module:name of a function"),
        ("envs.mix={}", "positive sum"),
        ("envs.mix={lookup=nan}", "envs.mix: shares must be >= 0"),
        ("evaluation.mix={lookup=1, branch=inf}", "evaluation.mix: shares must be >= 0"),
        ('envs.web.allowed_hosts=["wiki.local"]', "envs.web.allowed_hosts: 'wiki.local' must be host:port, such as"),
        ('envs.web.allowed_hosts=["http://wiki.local:80"]', "'http://wiki.local:80' must be host:port"),
        ('envs.web.blocked_hosts=["https://a.example"]', "'https://a.example' must be a host alone, such as"),
        ('envs.web.blocked_hosts=["a.example/answers"]', "'a.example/answers' must be a host alone"),
        ('envs.web.blocked_hosts=["*.a.example"]', "'*.a.example' must be a host alone"),
        ("envs.recording.mode=replay", "envs.recording: mode = 'replay' needs path, the file that is replayed"),
        ("envs.base_generator.model=m", "envs.base_generator: model is for a server: set base_url, or leave model out"),
        ("envs.base_generator.api_key_env=K", "api_key_env is for a server: set base_url, or leave api_key_env out"),
        ("rollout.max_turn_tokens=900", "leaves no room for prompts"),
        ("agent.verifier.type=model", "needs rollout.engine.adapter_mode = 'native'"),
        ("seed", "must look like learner.learning_rate=2e-6"),
        ("seed.x.y=1", "seed"),
    ],
)
def test_bad_value_is_one_line_that_names_the_key(override, message):
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_recipes_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_run_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"one of .*demo_cpu.*; did you mean 'demo_cpu'\?"):
        load_run_config(tmp_path / "demo_gpu.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = = 1")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_run_config(broken)


def test_tools_of_ones_own_survive_the_way_through_a_printed_recipe(tmp_path):
    actions = 'envs.actions=["weather", "lookup", "answer"]'
    lookup = 'envs.tools.lookup={source="mcp:python server.py#find", description="look it up"}'
    config = load_run_config(None, [actions, "envs.tools.weather.source=my_tools:Weather", lookup])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(render_config(config))
    # Their modules are looked for beside the recipe.
    assert load_run_config(recipe) == config.model_copy(update={"code_path": str(tmp_path)})
    assert config.envs.tools["lookup"].description == "look it up"


def test_configuration_cannot_be_changed_after_it_was_checked():
    config = load_run_config(None)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


def test_the_configuration_that_a_run_left_behind_is_a_recipe(tmp_path):
    config = load_run_config(None, ["seed=7", 'envs.mix={"branch"=1.0}'])
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert load_run_config(tmp_path / "config.json") == config
    for broken in ("{", "[1]", "3"):
        (tmp_path / "broken.json").write_text(broken)
        with pytest.raises(ConfigError, match="is not a JSON object"):
            load_run_config(tmp_path / "broken.json")


def test_a_built_in_recipe_is_found_by_its_name_wherever_one_is_and_a_file_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_run_config(Path("demo_cpu")) == load_run_config(RECIPES / "demo_cpu.toml")
    assert load_run_config(Path("demo_cpu.toml")).name == "demo"
    (tmp_path / "demo_cpu.toml").write_text('name = "mine"')
    assert load_run_config(Path("demo_cpu.toml")).name == "mine"


def test_every_pattern_of_a_setting_has_words_of_its_own():
    def patterns(model):
        for field in model.model_fields.values():
            yield from (part.pattern for part in field.metadata if getattr(part, "pattern", None))
            for one in (field.annotation, *get_args(field.annotation)):
                if isinstance(one, type) and issubclass(one, BaseModel):
                    yield from patterns(one)

    assert set(patterns(RunConfig)) <= set(FORMS)


@pytest.mark.parametrize(
    ("word", "known", "said"),
    [
        ("trian", ["train", "try", "label"], "; did you mean 'train'?"),
        ("xyzzy", ["train", "label"], ""),
        ("rate", ["a.rate", "b.rate"], "; did you mean 'a.rate' or 'b.rate'?"),
        ("b.rat", ["a.rate", "b.rate"], "; did you mean 'b.rate'?"),
    ],
)
def test_a_mistyped_word_is_compared_with_the_known_ones(word, known, said):
    assert did_you_mean(word, known) == said
