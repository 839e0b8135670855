"""Checks before a start: models, cards and cores, the run folder, keys, tools and the sandbox."""

import json
import os
import shlex

import pytest

from configs.loading import RECIPES, load_run_config
from envs.sandbox import SandboxRefusedError, SandboxState
from ray_jobs import cli
from ray_jobs.run import model_folder, preflight
from ray_jobs.run.model_folder import SMALL_FILES, WEIGHTS
from ray_jobs.run.preflight import (
    PreflightError,
    check_before_acting,
    check_before_start,
    check_machine,
)
from tests.rollout.chat_templates import GEMMA2, MISTRAL_V03, ROLES, tokenizer_of

NO_COLD_START = "cold_start.num_demonstrations=0"
SHAPE = {
    **{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
}
CARDS = ("rollout.engine.device=cuda", "learner.device=cuda")


@pytest.fixture
def model(tmp_path):
    """A model folder with an empty weights file; preflight only loads the tokenizer."""
    folder = tmp_path / "model"
    tokenizer_of(ROLES["chatml"]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture(autouse=True)
def sandbox(monkeypatch):
    """A sandbox that only counts its starts."""
    started = []

    class FakeSandbox:
        state = SandboxState(tier="landlock", layers=("landlock",), without="namespaces: forbidden")

        def __init__(self, settings):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            started.append(self)

    monkeypatch.setattr("envs.sandbox.Sandbox", FakeSandbox)
    return started


@pytest.fixture
def config(tmp_path, model):
    def build(*overrides):
        threads = ["rollout.engine.num_threads=1", "learner.num_threads=1"]
        return load_run_config(None, [f"output_dir={tmp_path}/runs", f"model.path={model}", *threads, *overrides])

    return build


@pytest.fixture
def hub(model, monkeypatch):
    """The file patterns of every download from the model hub."""
    patterns = []

    def download(path, allow_patterns, **_):
        patterns.append(allow_patterns)
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return patterns


def refusal(config):
    with pytest.raises(PreflightError) as caught:
        check_before_start(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_valid_configuration_passes(config, model, sandbox, tmp_path):
    ready = check_before_start(config())
    assert (ready.model_path, ready.sandbox.tier) == (model, "landlock")
    assert not (tmp_path / "runs").exists()
    assert len(sandbox) == 1


# --- models -------------------------------------------------------------------------------------------


def test_small_files_are_checked_before_the_download(config, model, hub):
    for template in (MISTRAL_V03, GEMMA2):
        tokenizer_of(template).save_pretrained(model)
        check_before_start(config("model.path=some/model"))
    assert hub == [SMALL_FILES, [*SMALL_FILES, WEIGHTS]] * 2
    (model / "chat_template.jinja").unlink()
    assert "chat template" in refusal(config("model.path=some/model"))
    with pytest.raises(PreflightError):
        check_before_acting(config("model.path=some/model"), draws_tasks=False)
    assert hub[4:] == [SMALL_FILES] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3_moe", "num_experts": 128},
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "qwen2", "use_sliding_window": True},
    ],
)
def test_untrainable_model_is_rejected_before_the_download(config, model, hub, changes):
    (model / "config.json").write_text(json.dumps(SHAPE | changes))
    assert "docs/your-model.md" in refusal(config("model.path=some/model"))
    with pytest.raises(PreflightError, match=r"prm\.model_path"):
        model_folder.prm_base("some/model")
    assert hub == [SMALL_FILES] * 2


# --- machine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "rejected"),
    [
        ((*CARDS, "rollout.num_workers=2"), 1, True),
        ((*CARDS, "rollout.num_workers=2"), 2, False),
        # 0.4 + 0.4 + 0.3 of one card.
        ((*CARDS, "prm.device=cuda", "card.prm=0.3"), 1, True),
        # 0.6 + 0.3 on one card, 0.6 on the other.
        ((*CARDS, "prm.device=cuda", "card.learner=0.6", "card.engine=0.6", "card.prm=0.3"), 2, False),
        ((*CARDS, "card.learner=0.6", "card.engine=0.6", "rollout.num_workers=2"), 2, True),
        # The shared card is whole; a further engine needs another.
        ((*CARDS, "card.shared=true", "rollout.num_workers=2"), 1, True),
        ((*CARDS, "card.shared=true", "rollout.num_workers=3"), 2, False),
        ((*CARDS, "rollout.engine.adapter_mode=native", "rollout.engine.tensor_parallel=2"), 1, True),
        # Another cluster's machines are not those of this one.
        ((*CARDS, "cluster.address=auto", "learner.num_threads=64"), 0, False),
    ],
)
def test_processes_are_counted_by_their_shares_of_cards(config, monkeypatch, overrides, num_gpus, rejected):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(preflight, "_num_gpus", lambda: num_gpus)
    run = config("reward.credit=outcome_gated", *overrides)
    if rejected:
        with pytest.raises(PreflightError):
            check_machine(run)
    else:
        check_machine(run)


def test_resumed_run_is_reduced_to_a_smaller_machine(config, tmp_path, monkeypatch, capsys):
    large = ("rollout.engine.num_threads=8", "learner.num_threads=2", "prm.num_threads=8", "rollout.num_workers=6")
    started = config(*large, "reward.credit=outcome_gated", "label=plan")
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(started.model_dump_json())
    (folder / "provenance.json").write_text('{"with_prm": false}')
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    runs = []
    monkeypatch.setattr("ray_jobs.train.run_training", lambda config, *_, **__: runs.append(config))
    monkeypatch.setattr("ray_jobs.run.origin.saved_config", lambda _: started)
    cli.resume(folder)
    [run] = runs
    threads = (run.rollout.engine.num_threads, run.learner.num_threads, run.prm.num_threads)
    assert (*threads, run.rollout.num_workers) == (3, 2, 3, 2)
    assert "rollout.engine.num_threads=3" in capsys.readouterr().out
    assert "rollout.engine.num_threads" in refusal(started)


# --- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.engine.max_model_len=4096"], "rollout.engine.max_model_len"),
        (["learner.num_threads=100000"], "learner.num_threads"),
        (['model.lora_targets=["c_attn"]'], "model.lora_targets"),
        (["rollout.engine.tensor_parallel=3", *CARDS, "rollout.engine.adapter_mode=native"], "CUDA"),
        (["reward.credit={prm_path='/does/not/exist'}"], "reward.credit.prm_path"),
        (["agent.prompt.instructions=" + "word " * 2000], "agent.prompt"),
        (
            [
                'envs.actions=["code","answer"]',
                NO_COLD_START,
                "agent.prompt.examples="
                + json.dumps(['Task: q\n{"thought":"t","action":"search","action_input":"x"}\nResult: y']),
            ],
            "agent.prompt.examples",
        ),
    ],
)
def test_setting_that_cannot_work_is_named(config, overrides, named, monkeypatch):
    monkeypatch.setattr(preflight, "_num_gpus", lambda: 0)
    assert named in refusal(config(*overrides))


def test_web_search_needs_its_key_and_no_message_holds_it(config, monkeypatch):
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    assert "TAVILY_API_KEY" in refusal(config("envs.search=tavily"))
    check_before_start(config("envs.search=tavily", 'envs.actions=["code", "answer"]', NO_COLD_START))
    monkeypatch.setenv("TAVILY_API_KEY", "secret")
    assert "secret" not in refusal(config("envs.search=tavily", "envs.mix={nonsense=1}"))


def test_sandbox_is_required_for_the_code_tool_only(config, monkeypatch):
    def refuse(settings):
        raise SandboxRefusedError("no landlock")

    monkeypatch.setattr("envs.sandbox.Sandbox", refuse)
    code = 'envs.actions=["search", "code", "answer"]'
    with pytest.raises(PreflightError) as caught:
        check_before_acting(config(code), draws_tasks=False)
    assert refusal(config(code, NO_COLD_START)) == str(caught.value)
    assert check_before_start(config('envs.actions=["search", "answer"]', NO_COLD_START)).sandbox is None
    # The demonstrations call the code tool as well.
    check_before_start(config(*shlex.split(refusal(config()).partition("out: ")[2])))


# --- run folder ---------------------------------------------------------------------------------------


def test_run_folder_is_writable_and_of_the_same_run(config, tmp_path):
    folder = tmp_path / "runs" / "run"
    (tmp_path / "runs").touch()
    assert "output_dir" in refusal(config())
    (tmp_path / "runs").unlink()
    folder.mkdir(parents=True)
    check_before_start(config())
    (folder / "config.json").touch()
    assert "config.json" in refusal(config())
    (folder / "config.json").write_text(config().model_dump_json())
    check_before_start(config())
    assert "(seed)" in refusal(config("seed=7"))
    check_before_acting(config(), draws_tasks=True)


def test_every_recipe_fits_a_large_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(preflight, "_num_gpus", lambda: 8)
    for recipe in RECIPES.glob("*.toml"):
        check_machine(load_run_config(recipe))
