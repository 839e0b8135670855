import hashlib
import json

import pytest
from ollama_protocol import ScriptedOllama, said, serving
from scripted import decision

from configs.run import RunConfig
from learner.export import ExportError
from ray_jobs.cli import main
from ray_jobs.serve import run_serve
from rollout.engines.engine import BackendError

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
    return RunConfig.model_validate(
        {
            "envs": {"actions": ["think", "answer"]},
            "backend": {"type": "ollama", "model": "mine", "base_url": url, "max_retries": 0},
        }
    )


@pytest.fixture
def ollama():
    return ScriptedOllama(models=())


def test_an_export_becomes_a_model_of_ollama_and_answers_as_a_planner(export, ollama, capsys):
    ollama.replies = [said(decision("answer", "42"))]
    with serving(ollama) as url:
        run_serve(config_for(url), export)
    assert ollama.faults == []
    assert ollama.blobs == {f"sha256:{DIGEST}": b"GGUF bytes"}
    assert ollama.created == [
        {
            "model": "mine",
            "files": {"model-q8_0.gguf": f"sha256:{DIGEST}"},
            "template": TEMPLATE,
            "parameters": PARAMETERS,
            "stream": False,
        }
    ]
    (chat,) = ollama.chats
    assert (chat["model"], chat["think"], chat["stream"]) == ("mine", False, False)
    assert [message["role"] for message in chat["messages"]] == ["system", "user"]
    assert "agentflow solve QUESTION --backend ollama:mine" in " ".join(capsys.readouterr().out.split())


def test_a_file_that_the_server_has_is_not_sent_again(export, ollama):
    ollama.replies = [said(decision("answer", "42"))]
    ollama.blobs[f"sha256:{DIGEST}"] = b"kept"
    with serving(ollama) as url:
        run_serve(config_for(url), export)
    assert ollama.blobs == {f"sha256:{DIGEST}": b"kept"}


def test_a_model_that_does_not_answer_as_a_planner_is_said(export, ollama):
    ollama.replies = [said("Hello! How can I help?")]
    with serving(ollama) as url, pytest.raises(BackendError, match="does not answer as a planner: not one complete"):
        run_serve(config_for(url), export)


def test_an_export_of_an_agent_of_ones_own_is_refused_before_it_is_sent(export, ollama):
    manifest = json.loads((export / "export.json").read_text()) | {"source": {"agent": "function"}}
    (export / "export.json").write_text(json.dumps(manifest))
    with serving(ollama) as url, pytest.raises(ExportError, match=r"agent\.type = 'function'.* knows the planner only"):
        run_serve(config_for(url), export)
    assert ollama.blobs == {}


def test_a_recipe_whose_data_are_not_here_is_refused_before_anything_is_sent(export, ollama):
    with serving(ollama) as url:
        change = {"envs": {"mix": {"own_text": 1.0}, "data_path": "gone.jsonl"}}
        config = RunConfig.model_validate(config_for(url).model_dump(mode="json") | change)
        with pytest.raises(
            ExportError, match=r"cannot be drawn: .*; give the recipe that it was trained with, from the"
        ):
            run_serve(config, export)
    assert ollama.blobs == {}


def test_a_changed_file_is_never_served(export, ollama):
    (export / "model-q8_0.gguf").write_bytes(b"other bytes")
    with serving(ollama) as url, pytest.raises(ExportError, match="is not the file that was exported"):
        run_serve(config_for(url), export)
    assert ollama.blobs == {}


def test_an_export_without_gguf_cannot_be_served(export, ollama):
    (export / "export.json").write_text(json.dumps({"gguf": None, "files": {}}))
    with pytest.raises(ExportError, match="holds no GGUF file"):
        run_serve(config_for("http://127.0.0.1:9"), export)


def test_an_absent_server_is_one_line(export, capsys):
    arguments = ["serve", str(export), 'envs.actions=["think", "answer"]']
    assert main([*arguments, "backend.base_url=http://127.0.0.1:9", "backend.max_retries=0"]) == 2
    assert capsys.readouterr().err.startswith("agentflow: error: http://127.0.0.1:9: model-q8_0.gguf was not taken")
