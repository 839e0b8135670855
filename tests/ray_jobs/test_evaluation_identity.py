import sys

import pytest
from evaluating import config_for, model_in
from ollama_protocol import ScriptedOllama, serving

from configs.errors import UserError
from configs.loading import load_run_config
from envs.types import Task
from ray_jobs.evaluation import identity_of

OWN_AGENT = "cold_start.num_demonstrations=0", "reward.credit=outcome"
TASKS = [Task(id="1", dataset="musique", question="Who?", answer="Ada")]


class OllamaWithModels(ScriptedOllama):
    """A server that lists its models, with the fields of docs/api.md."""

    def answer(self, method, path, raw):
        if (method, path) != ("GET", "/api/tags"):
            return super().answer(method, path, raw)
        details = {"format": "gguf", "family": "qwen3", "parameter_size": "8.2B", "quantization_level": "Q8_0"}
        model = {"name": "planner:latest", "model": "planner:latest", "digest": "ab" * 32, "details": details}
        return 200, {"models": [model]}


def local(tmp_path, *overrides, tasks=TASKS, model=None):
    config = config_for(tmp_path, *overrides)
    return identity_of(config, adapter=None, model_path=model or model_in(tmp_path), tasks=tasks, num_seeds=1)


def served(address, model="planner"):
    settings = ["backend.type=ollama", f"backend.model={model}", f"backend.base_url={address}"]
    return identity_of(load_run_config(None, settings), adapter=None, model_path=None, tasks=TASKS, num_seeds=1)


def test_ollama_reports_the_digest_and_the_quantisation():
    with serving(OllamaWithModels()) as address:
        identity, unknown = served(address), served(address, model="another")
    assert (identity.policy["model_digest"], identity.fixed["quantisation"]) == ("ab" * 32, "Q8_0")
    assert unknown.policy["model_digest"] is unknown.fixed["quantisation"] is None
    with pytest.raises(UserError, match=r"backend\.base_url"):
        served("http://127.0.0.1:1")


def test_weights_have_a_digest_that_does_not_depend_on_their_folder(tmp_path):
    first = local(tmp_path)
    moved = model_in(tmp_path).rename(tmp_path / "moved")
    same = local(tmp_path, model=moved)
    assert same.policy["model_digest"] == first.policy["model_digest"]
    (moved / "model.safetensors").write_bytes(b"weightt")
    other = local(tmp_path, model=moved)
    assert other.policy["model_digest"] != first.policy["model_digest"]
    assert same.differences(other) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], []),
        (["agent.memory=in_process"], []),
        (["agent.memory=in_process", "agent.memory.in_evaluation=true"], ["agent"]),
        (["rollout.engine.adapter_mode=native", "agent.verifier=model"], ["agent", "sampling"]),
        (["rollout.count_failed=false"], ["sampling"]),
        (["reward.timeout_s=7"], ["sampling"]),
        (["rollout.temperature=0.5"], []),
        (["evaluation.judge.model=m"], ["judge"]),
        (["agent.function=evaluating:hesitant", *OWN_AGENT], ["agent", "code", "sampling"]),
    ],
)
def test_settings_that_make_a_difference(tmp_path, settings, expected):
    assert sorted(local(tmp_path).differences(local(tmp_path, *settings))) == expected


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write the module `custom_code`, and forget earlier imports of it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text):
        sys.modules.pop("custom_code", None)
        (tmp_path / "custom_code.py").write_text(text)

    yield write
    sys.modules.pop("custom_code", None)


TOOL = 'def weather(city: str) -> str:\n    """Return the weather of a city."""\n    return "{}"\n'


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (TOOL, ['envs.tools={weather = {source = "custom_code:weather"}}', 'envs.actions=["weather", "answer"]']),
        ('async def solve(task, client):\n    return "{}"\n', ["agent.function=custom_code:solve", *OWN_AGENT]),
    ],
)
def test_custom_code_has_the_digest_of_its_file(tmp_path, written, text, settings):
    found = []
    for value in ("sun", "sun", "rain"):
        written(text.format(value))
        found.append(local(tmp_path, *settings))
    assert found[0].differences(found[1]) == []
    assert found[0].differences(found[2]) == ["code"]
