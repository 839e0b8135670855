"""Recipes, overrides, and errors that name the setting."""

from pathlib import Path

import pytest

from configs import base
from configs.errors import UserError
from configs.learner import FlowGrpoConfig
from configs.loading import ELSEWHERE, RECIPES, load_run_config, opening_comment, render_config, setting_names
from configs.reward import OutcomeConfig
from configs.run import RunConfig


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_loads_and_its_resolved_form_is_the_same_recipe(recipe, tmp_path):
    config = load_run_config(recipe)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(render_config(config))
    assert load_run_config(resolved) == config
    assert opening_comment(Path(recipe.stem)) == opening_comment(recipe) != ""


@pytest.mark.parametrize(
    "override",
    [
        "evaluation.num_tasks=7",
        'envs.mix={"a.b/c d"=1}',
        'output_dir="😀 \\"\\t\\u007f"',
        "envs.web.blocked_questions=a#b",
        'envs.tools.a={source="mcp:python server.py#find", description="look it up"}',
    ],
)
def test_rendered_configuration_loads_back_for_any_value(override, tmp_path):
    config = load_run_config(None, [override])
    (tmp_path / "rendered.toml").write_text(render_config(config))
    assert load_run_config(tmp_path / "rendered.toml") == config


@pytest.mark.parametrize("name", ["2024-01-01", "1.10", "1e5", "007", "nan", "12", "1_000", "0x10"])
def test_name_that_looks_like_a_number_or_a_date_stays_as_it_is_written(name):
    config = load_run_config(None, [f"name={name}", f"envs.web.blocked_questions={name}"])
    assert (config.name, config.envs.web.blocked_questions) == (name, name)
    assert load_run_config(None, ["envs.datasets.a.source=m:f", f"envs.datasets.a.answer={name}"])


def test_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    for name, text in {"a.toml": 'name = "e"\r\n', "a.json": '{"name": "e"}'}.items():
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert load_run_config(tmp_path / name).name == "e"


def test_a_path_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    memory = 'agent.memory={type="folder", path="~/m"}'
    config = load_run_config(None, ["output_dir=~/runs", "name=a", "envs.web.blocked_questions=~/q.txt", memory])
    assert config.run_path == Path("/home/me/runs/a")
    assert (config.envs.web.blocked_questions, config.planner.memory.path) == ("/home/me/q.txt", "/home/me/m")


def test_the_last_override_wins(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("seed = 1\n[learner]\nlearning_rate = 1e-3\n")
    config = load_run_config(recipe, ["learner.learning_rate=2e-6", "seed=5", "seed=7", "name=mine"])
    assert (config.learner.learning_rate, config.seed, config.name) == (2e-6, 7, "mine")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("sede=1", "sede"),
        ("seed=abc", "seed"),
        ("seed.x=1", "seed"),
        ("learner=1", "learner"),
        ("learner.loss.type=x", "learner.loss"),
        ("backend.base_url=here", "backend.base_url"),
        ("learner.learning_rate=1e400", "learner.learning_rate"),
        ("learner.learning_rate=false", "learner.learning_rate"),
        ("name=true", "name"),
        ("num_steps=true", "num_steps"),
        ("num_steps='5'", "num_steps"),
        ("seed=2024-01-01", "seed"),
        ("rollout.max_workers=true", "rollout.max_workers"),
        ("envs.mix={lookup=true}", "envs.mix.lookup"),
        ("learner.correction_band=[true, 2]", "learner.correction_band.0"),
        ("cluster.dashboard=1", "cluster.dashboard"),
        (f"seed={'[' * 10_000}", "seed"),
        ("name=../elsewhere", "name"),
        ('envs.actions=["code"]', "envs"),
        ('envs.actions=["serach", "answer"]', "envs"),
        ("envs.tools.x.source=no_class", "envs.tools.x.source"),
        ("envs.mix={}", "envs.mix"),
        ("envs.mix={lookup=nan}", "envs.mix"),
        ('envs.web.allowed_hosts=["wiki.local"]', "envs.web.allowed_hosts.0"),
        ('envs.web.blocked_hosts=["https://a.example"]', "envs.web.blocked_hosts.0"),
        ("envs.base_generator.model=m", "envs.base_generator.base_url"),
        ('agent.memory={type="folder", path=""}', "agent.memory.path"),
        ("agent=5", "agent"),
        ("model=Qwen/Qwen3-1.7B", "model"),
        ("trackers=wandb", "trackers"),
        ("envs.mix=lookup", "envs.mix"),
        ("reward.scorer=text", "reward.scorer"),
        ("reward.scorer=my_reward.py:score", "reward.scorer"),
        ("load_in_4bit=true", "load_in_4bit"),
        ("seed", "override 'seed'"),
    ],
)
def test_a_bad_value_is_one_line_that_begins_with_the_key(override, key):
    with pytest.raises(UserError) as caught:
        load_run_config(None, [override])
    assert str(caught.value).startswith((f"{key}: ", f"unknown key '{key}'", f"{key} "))
    assert "\n" not in str(caught.value)


def test_fewer_workers_at_most_than_at_the_start_are_refused():
    with pytest.raises(UserError, match=r"rollout\.max_workers"):
        load_run_config(None, ["rollout.max_workers=1", "rollout.num_workers=3"])


def test_default_that_depends_on_a_wrong_setting_is_no_error_of_its_own():
    with pytest.raises(UserError, match=r"^rollout\.engine\.device: (?!.*adapter_mode)"):
        load_run_config(None, ["rollout.engine.device=gpu"])
    assert load_run_config(None, ["rollout.engine.device=cuda"]).rollout.engine.adapter_mode == "native"


@pytest.mark.parametrize(
    ("override", "setting"),
    [
        ("rollout.num_generations=8", "rollout.group_size"),
        ("lr=1e-6", "learner.learning_rate"),
        ("actor_rollout_ref.rollout.n=4", "rollout.group_size"),
        ("trainer.test_freq=3", "evaluation.every_steps"),
    ],
)
def test_settings_of_other_trainers_are_known(override, setting):
    with pytest.raises(UserError, match=setting):
        load_run_config(None, [override])
    assert set(ELSEWHERE.values()) <= set(setting_names(RunConfig))


def test_an_unknown_setting_is_compared_with_the_known_ones():
    for key, known in {
        "learner.lerning_rate": "learner.learning_rate",
        "learner.num_steps": "num_steps",
        "learner.loss.clip_lo": "learner.loss.clip_low",
    }.items():
        with pytest.raises(UserError, match=f"'{known}'"):
            load_run_config(None, [f"{key}=1"])


def test_missing_and_broken_recipes_are_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml"):
        load_run_config(tmp_path / "none.toml")
    for name, content in {
        "a.toml": "seed = = 1",
        "b.json": "{",
        "c.json": "[1]",
        "d.json": "3",
        "e.json": "[" * 100_000,
        "f.toml": f"seed = {'[' * 10_000}",
    }.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=name):
            load_run_config(tmp_path / name)


def test_a_built_in_recipe_is_found_by_name_unless_a_file_has_this_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_run_config(Path("demo_cpu")) == load_run_config(RECIPES / "demo_cpu.toml")
    (tmp_path / "demo_cpu.toml").write_text('name = "mine"')
    assert load_run_config(Path("demo_cpu.toml")).name == "mine"


def test_a_type_may_be_written_alone_and_completed_by_overrides(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[learner]\nloss = "flow_grpo"\n')
    assert load_run_config(recipe).learner.loss == FlowGrpoConfig()
    config = load_run_config(recipe, ["learner.loss.kl_weight=0.7", "reward.credit=outcome"])
    assert config.learner.loss == FlowGrpoConfig(kl_weight=0.7)
    assert config.reward.credit == OutcomeConfig()


@pytest.mark.parametrize(
    ("loss", "fits", "refused"),
    [
        ("cispo", "learner.correction=none", "learner.correction=tis"),
        ("gspo", "learner.correction=none", "learner.correction=tis"),
        ("dr_grpo", "reward.credit=outcome_centered", "reward.credit=outcome"),
    ],
)
def test_a_loss_is_refused_with_a_correction_or_credit_that_does_not_fit(loss, fits, refused):
    config = load_run_config(None, [f"learner.loss={loss}", fits])
    assert loss == "dr_grpo" or load_run_config(None, [f"learner.loss={loss}"]) == config
    with pytest.raises(UserError, match=refused.partition("=")[0]):
        load_run_config(None, [f"learner.loss={loss}", refused])


def test_guided_attempts_are_refused_in_a_synchronous_run():
    assert load_run_config(None, ["reward.credit.candidates=8"]).reward.credit.type == "outcome_guided"
    with pytest.raises(UserError, match="pipeline_depth"):
        load_run_config(None, ["reward.credit=outcome_guided", "pipeline_depth=0"])


INTEL, AMD = "vendor_id\t: GenuineIntel\n", "vendor_id\t: AuthenticAMD\n"


@pytest.mark.parametrize(
    ("info", "fastest", "lacks_avx512"),
    [
        (INTEL + "flags\t\t: avx512f avx512_bf16 amx_bf16 amx_tile\n", "bfloat16", False),
        (INTEL + "flags\t\t: avx512f avx512_bf16\n", "float32", False),
        (AMD + "flags\t\t: avx2 avx512f avx512_bf16\n", "bfloat16", False),
        (AMD + "flags\t\t: fma avx2\n", "float32", True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", "float32", False),
        (None, "float32", False),
    ],
    ids=["Intel with AMX", "Intel without", "AMD with AVX-512", "AMD without", "ARM", "no such file"],
)
def test_the_faster_precision_of_a_cpu(tmp_path, monkeypatch, info, fastest, lacks_avx512):
    path = tmp_path / "cpuinfo"
    if info is not None:
        path.write_text(info)
    monkeypatch.setattr(base, "CPU_INFO", path)
    assert base.fastest_precision("cpu") == fastest
    assert base.fastest_precision("cuda") == "bfloat16"
    assert base.lacks_avx512() == lacks_avx512
