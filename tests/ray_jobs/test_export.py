import hashlib
import json

import pytest
from tiny_export import greedy_answer, load_model, random_adapter, save_tiny_export_model, with_adapter

from configs.errors import UserError
from configs.run import RunConfig
from learner.checkpoint import write_manifest
from ray_jobs.export import MANIFEST, run_export
from ray_jobs.run.model_folder import demo_model_dir
from rollout.agent.agent import build_chat
from rollout.files import file_digest

OPTIONS = {"formats": ("hf", "gguf"), "quantization": "q8_0"}


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


def test_export_files_and_manifest(run, model_path, adapter, tmp_path):
    run_export(run, tmp_path / "out", **OPTIONS)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["files"]["Modelfile"] == file_digest(tmp_path / "out" / "Modelfile")
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
    assert manifest["gguf"] == {"file": "model-q8_0.gguf", "quantization": "q8_0"}
    on_disk = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert set(manifest["files"]) == on_disk - {"export.json"}
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert text.startswith("FROM ./model-q8_0.gguf\nTEMPLATE ")
    assert "PARAMETER num_ctx 128\n" in text
    assert 'PARAMETER stop "<|im_end|>"\n' in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


@pytest.mark.parametrize("fault", ["changed", "exists", "lonely", "missing"])
def test_invalid_source_or_target_is_rejected(fault, run, tmp_path):
    source = run
    checkpoint = run / "checkpoints" / "v000003"
    if fault == "changed":
        (checkpoint / "adapter.safetensors").write_bytes(b"other")
    elif fault == "exists":
        (tmp_path / "out").mkdir()
    elif fault == "lonely":
        source = checkpoint.rename(tmp_path / "v000003")
    else:
        source = tmp_path / "nowhere"
    with pytest.raises(UserError):
        run_export(source, tmp_path / "out", **OPTIONS)
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.slow
def test_exported_model_gives_the_same_answers(tmp_path):
    """Compare unmerged adapter and merged model."""
    base = demo_model_dir()
    adapter = random_adapter(base, scale=0.004)
    run = make_run(tmp_path / "run", base, adapter, agent={"max_steps": 5}, rollout={"max_turn_tokens": 12})
    run_export(run, tmp_path / "out", **OPTIONS)
    prompt = build_chat(tmp_path / "out" / "hf").prompt("Answer.", "Task: what do 35 crates of wool locks weigh?")
    beside = with_adapter(load_model(base), adapter=adapter)
    merged = load_model(tmp_path / "out" / "hf")
    assert greedy_answer(merged, prompt, 12) == greedy_answer(beside, prompt, 12)
