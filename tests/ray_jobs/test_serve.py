import hashlib
import json

import pytest
from ollama_protocol import ScriptedOllama, serving

from configs.errors import UserError
from configs.run import RunConfig
from ray_jobs.export import run_serve
from rollout.engines import served

PARAMETERS = {"temperature": 0.0, "num_ctx": 512, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
TEMPLATE = "{{ range $i, $m := .Messages }}{{ $m.Content }}{{ end }}"
DIGEST = hashlib.sha256(b"GGUF bytes").hexdigest()


@pytest.fixture
def export(tmp_path):
    (tmp_path / "model-q8_0.gguf").write_bytes(b"GGUF bytes")
    gguf = {"file": "model-q8_0.gguf", "quantization": "q8_0", "template": TEMPLATE, "parameters": PARAMETERS}
    (tmp_path / "export.json").write_text(json.dumps({"gguf": gguf, "files": {"model-q8_0.gguf": DIGEST}}))
    return tmp_path


def config_for(url):
    backend = {"type": "ollama", "model": "mine", "base_url": url}
    return RunConfig.model_validate({"envs": {"actions": ["think", "answer"]}, "backend": backend})


@pytest.fixture
def ollama(monkeypatch):
    monkeypatch.setattr(served, "MAX_RETRIES", 0)
    return ScriptedOllama(models=())


def test_export_becomes_a_model_of_ollama(export, ollama, capsys):
    with serving(ollama) as url:
        run_serve(config_for(url), export)
    assert ollama.faults == []
    assert ollama.blobs == {f"sha256:{DIGEST}": b"GGUF bytes"}
    files = {"model-q8_0.gguf": f"sha256:{DIGEST}"}
    created = {"model": "mine", "files": files, "template": TEMPLATE, "parameters": PARAMETERS, "stream": False}
    assert ollama.created == [created]
    assert ollama.chats == []
    assert "agentflow solve QUESTION --backend ollama:mine" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("fault", ["changed", "no gguf"])
def test_unusable_export_is_rejected_before_it_is_sent(fault, export, ollama):
    manifest = json.loads((export / "export.json").read_text())
    if fault == "changed":
        (export / "model-q8_0.gguf").write_bytes(b"other bytes")
    else:
        manifest["gguf"] = None
    (export / "export.json").write_text(json.dumps(manifest))
    with serving(ollama) as url, pytest.raises(UserError):
        run_serve(config_for(url), export)
    assert ollama.blobs == {}
