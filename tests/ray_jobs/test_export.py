import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_export import random_adapter, save_tiny_export_model

from configs.errors import UserError
from configs.run import RunConfig
from learner.checkpoint import write_manifest
from learner.demo_model import demo_model_dir
from ray_jobs import export
from ray_jobs.export import find_source, planner_openings, read_export, run_export
from ray_jobs.gguf import greedy_answer, loaded_model
from rollout.agent.agent import build_chat
from rollout.engines.adapters import AdapterMerger, weights_in

OPTIONS = {"formats": ("hf", "gguf"), "quantization": "q8_0", "num_prompts": 2}


def make_run(folder, model_path, adapter, **changes):
    """Write a run folder with one checkpoint."""
    config = RunConfig.model_validate(
        {
            "name": "tiny",
            "model": {"path": str(model_path), "lora_rank": 4, "lora_alpha": 8.0},
            "envs": {"actions": ["think", "answer"]},
            "agent": {"max_steps": 2},
            "rollout": {"max_turn_tokens": 12, "engine": {"max_model_len": 128}},
        }
        | changes
    )
    checkpoint = folder / "checkpoints" / "v000003"
    checkpoint.mkdir(parents=True)
    (folder / "config.json").write_text(config.model_dump_json())
    (checkpoint / "adapter.safetensors").write_bytes(adapter)
    write_manifest(checkpoint, policy_version=3, step=3)
    return folder


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_export_model(tmp_path_factory.mktemp("model") / "m", "qwen3")


@pytest.fixture(scope="module")
def adapter(model_path):
    return random_adapter(model_path)


@pytest.fixture
def run(tmp_path, model_path, adapter):
    return make_run(tmp_path / "runs" / "tiny", model_path, adapter)


def test_export_holds_both_models_a_modelfile_and_their_origin(run, model_path, adapter, tmp_path):
    run_export(str(run), None, tmp_path / "out", **OPTIONS)
    manifest = read_export(tmp_path / "out", ("model-q8_0.gguf", "Modelfile", "hf/model.safetensors"))
    assert manifest["source"] == {
        "run": "tiny",
        "checkpoint": "v000003",
        "policy_version": 3,
        "adapter_sha256": hashlib.sha256(adapter).hexdigest(),
        "base_model": str(model_path),
        "base_sha256": {
            "model.safetensors": hashlib.sha256((model_path / "model.safetensors").read_bytes()).hexdigest()
        },
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "agent": "planner",
    }
    gguf = manifest["gguf"]
    assert (gguf["file"], gguf["quantization"], gguf["gap"]["num_prompts"]) == ("model-q8_0.gguf", "q8_0", 2)
    assert 0 < gguf["gap"]["mean_abs_logprob"] < 1
    on_disk = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert set(manifest["files"]) == on_disk - {"export.json"}
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert text.startswith("FROM ./model-q8_0.gguf\nTEMPLATE ")
    assert "PARAMETER num_ctx 128\n" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_export_has_the_precision_of_the_engine(tmp_path, model_path, precision):
    engine = {"max_model_len": 128, "dtype": precision}
    small = random_adapter(model_path, scale=0.003)
    run = make_run(tmp_path / "run", model_path, small, rollout={"max_turn_tokens": 12, "engine": engine})
    run_export(str(run), None, tmp_path / "out", formats=("hf", "gguf"), quantization="bf16", num_prompts=1)
    folder = tmp_path / "out" / "hf"
    merger = AdapterMerger(model_path, 2.0, dtype=precision)
    sampled_with, exported = (dict(weights) for weights in (merger.merged_weights(small), weights_of(folder)))
    assert exported.keys() == sampled_with.keys()
    assert all(exported[name].dtype == weight.dtype for name, weight in sampled_with.items())
    assert all(exported[name].equal(weight) for name, weight in sampled_with.items())
    assert json.loads((folder / "config.json").read_text())["dtype"] == precision
    gap = read_export(tmp_path / "out", ())["gguf"]["gap"]["mean_abs_logprob"]
    # 16 bits hold all of bfloat16, but not all of float32.
    assert (gap > 0) == (precision == "float32")


def weights_of(folder):
    return ((name, tensors.get_tensor(name)) for name, tensors in weights_in(folder))


OWN_TASKS = """
def load():
    return [{"question": f"own {n}?", "answer": "a", "split": split} for n, split in enumerate(("train", "eval"))]
"""


@pytest.fixture
def run_of_elsewhere(tmp_path, model_path, adapter, monkeypatch):
    """A run that was started in `home`, where its relative paths start; commands run elsewhere."""
    home = tmp_path / "home"
    (home / "recipes").mkdir(parents=True)
    (home / "recipes" / "tasks_of_an_exported_run.py").write_text(OWN_TASKS)
    rows = ({"question": f"written {n}?", "answer": "a", "split": part} for n, part in enumerate(("train", "eval")))
    (home / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "model").symlink_to(model_path)
    envs = {
        "mix": {"own_text": 0.5, "mine": 0.5},
        "data_path": "mine.jsonl",
        "datasets": {"mine": {"source": "tasks_of_an_exported_run:load"}},
        "actions": ["think", "answer"],
    }
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield make_run(home / "runs" / "tiny", "model", adapter, envs=envs, code_path="recipes")
    sys.modules.pop("tasks_of_an_exported_run", None)


def test_run_is_exported_from_any_folder_with_its_own_model_data_and_tasks(run_of_elsewhere, monkeypatch):
    openings = []
    draw = export.planner_openings
    monkeypatch.setattr(export, "planner_openings", lambda *args: openings.extend(draw(*args)) or openings)
    run_export(str(run_of_elsewhere), None, Path("out"), **OPTIONS)
    assert sorted(user.splitlines()[0] for _, user in openings) == ["Task: own 1?", "Task: written 1?"]
    assert read_export(Path("out"), ())["gguf"]["gap"]["num_prompts"] == 2


def test_custom_agent_has_no_planner_prompts_that_measure_the_quantization(tmp_path, model_path, adapter):
    agent = {"type": "function", "function": "mine:solve"}
    rollout = {"max_turn_tokens": 12, "engine": {"max_model_len": 128}}
    own = {"agent": agent, "envs": {}, "rollout": rollout, "cold_start": {"num_demonstrations": 0}}
    run = make_run(tmp_path / "runs" / "own", model_path, adapter, reward={"credit": "outcome"}, **own)
    run_export(str(run), None, tmp_path / "out", **OPTIONS)
    manifest = read_export(tmp_path / "out", ("model-q8_0.gguf",))
    assert (manifest["source"]["agent"], manifest["gguf"]["gap"]) == ("function", None)


def test_run_checkpoint_and_adapter_file_name_the_same_policy(run):
    checkpoint = run / "checkpoints" / "v000003"
    for source in (run, checkpoint, checkpoint / "adapter.safetensors"):
        found = find_source(str(source), None)
        assert (found.checkpoint, found.config.name) == (checkpoint, "tiny")
    assert find_source("none", None).checkpoint is None


def test_full_disk_leaves_nothing_behind(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ray_jobs.export.write_gguf", full)
    with pytest.raises(UserError, match="No space left on device"):
        run_export(str(run), None, tmp_path / "out", **OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_model_without_a_gguf_form_is_exported_for_hugging_face(tmp_path):
    model = save_tiny_export_model(tmp_path / "m", "gemma", head_dim=16)
    run = make_run(tmp_path / "run", model, random_adapter(model))
    with pytest.raises(UserError, match="--format hf"):
        run_export(str(run), None, tmp_path / "out", **OPTIONS)
    run_export(str(run), None, tmp_path / "out", formats=("hf",), quantization="q8_0", num_prompts=0)


def test_changed_export_is_rejected(run, tmp_path):
    run_export(str(run), None, tmp_path / "out", formats=("gguf",), quantization="f16", num_prompts=0)
    (tmp_path / "out" / "Modelfile").write_text("FROM other")
    with pytest.raises(UserError, match="Modelfile"):
        read_export(tmp_path / "out", ("Modelfile",))
    (tmp_path / "out" / "export.json").write_text("{")
    with pytest.raises(UserError, match="export"):
        read_export(tmp_path / "out", ())


@pytest.mark.parametrize("fault", ["changed", "exists", "scale", "lonely", "missing", "full"])
def test_unusable_source_or_target_is_rejected_before_anything_is_written(
    fault, run, model_path, tmp_path, monkeypatch
):
    recipe, source = None, run
    checkpoint = run / "checkpoints" / "v000003"
    if fault == "changed":
        (checkpoint / "adapter.safetensors").write_bytes(b"other")
    elif fault == "exists":
        (tmp_path / "out").mkdir()
    elif fault == "scale":
        recipe = tmp_path / "mine.toml"
        recipe.write_text(f"[model]\npath = '{model_path}'\nlora_rank = 4\nlora_alpha = 16.0\n")
    elif fault == "lonely":
        source = checkpoint.rename(tmp_path / "v000003")
    elif fault == "missing":
        source = tmp_path / "nowhere"
    elif fault == "full":
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5000))
    with pytest.raises(UserError):
        run_export(str(source), recipe, tmp_path / "out", **OPTIONS)
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.slow
def test_demo_model_answers_planner_prompts_the_same_after_the_export(tmp_path):
    """Compare unmerged adapter, merged model and GGUF file on the same prompts."""
    import torch
    from peft import get_peft_model, set_peft_model_state_dict
    from safetensors.torch import load
    from tiny_export import lora_config

    base = demo_model_dir()
    adapter = random_adapter(base, scale=0.004)
    run = make_run(tmp_path / "run", base, adapter, agent={"max_steps": 5}, rollout={"max_turn_tokens": 12})
    run_export(str(run), None, tmp_path / "out", formats=("hf", "gguf"), quantization="q8_0", num_prompts=2)
    config = find_source(str(run), None).config
    chat = build_chat(tmp_path / "out" / "hf")
    prompts = [chat.prompt(*text) for text in planner_openings(config, 2)]
    with loaded_model(base) as model:
        beside = get_peft_model(model, lora_config(4)).eval()
        set_peft_model_state_dict(beside, load(adapter))
        with torch.inference_mode():
            in_place = [greedy_answer(beside, prompt, 12) for prompt in prompts]
    with loaded_model(tmp_path / "out" / "hf") as merged:
        assert [greedy_answer(merged, prompt, 12) for prompt in prompts] == in_place
    gap = json.loads((tmp_path / "out" / "export.json").read_text())["gguf"]["gap"]
    assert gap["same_answers"] == gap["num_prompts"] == 2
    assert gap["mean_kl"] < 0.01
    assert gap["same_top"] > 0.95
