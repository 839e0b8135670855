import importlib
import json
import sys

import pytest
from evaluating import config_for, model_in
from ollama_protocol import ScriptedOllama, serving

from configs.loading import load_run_config
from envs.types import Task
from ray_jobs.evaluation_identity import FIXED, differences, identity_of, unproven
from reward.scorers import game24
from tests.changed import replace

TASKS = [Task(id="1", dataset="musique", question="Who?", answer="Ada")]


class OllamaWithModels(ScriptedOllama):
    """Adds the list of models, with the fields of docs/api.md."""

    def answer(self, method, path, raw):
        if (method, path) != ("GET", "/api/tags"):
            return super().answer(method, path, raw)
        details = {"format": "gguf", "family": "qwen3", "parameter_size": "8.2B", "quantization_level": "Q8_0"}
        return 200, {"models": [{"name": "planner:latest", "digest": "ab" * 32, "details": details}]}


def own(tmp_path, *overrides):
    config = config_for(tmp_path, *overrides)
    return identity_of(config, adapter=None, model_path=model_in(tmp_path), tasks=TASKS, num_seeds=1)


def served(address, model="planner"):
    config = load_run_config(
        None, ["backend.type=ollama", f"backend.model={model}", f"backend.base_url={address}", "backend.max_retries=0"]
    )
    return identity_of(config, adapter=None, model_path=None, tasks=TASKS, num_seeds=1)


def test_ollama_tells_the_digest_and_the_quantisation_of_what_it_serves():
    with serving(OllamaWithModels()) as address:
        identity = served(address)
    assert identity["policy"]["model_digest"] == "ab" * 32
    assert identity["quantisation"]["weights"] == "Q8_0"
    assert unproven(identity) == []


def test_what_a_server_does_not_tell_is_named_and_not_made_up():
    with serving(OllamaWithModels()) as address:
        identity = served(address, model="another")
    assert identity["quantisation"]["weights"] is None
    assert unproven(identity) == ["quantisation", "digest of the model"]


def test_frozen_module_that_asks_a_model_is_named_by_its_weights_too(tmp_path):
    native = "rollout.engine.adapter_mode=native"
    rule, model = own(tmp_path, native), own(tmp_path, native, "agent.verifier.type=model")
    assert rule["verifier"]["weights"] is None
    assert model["verifier"]["weights"] == model["policy"]["model_digest"]
    assert differences(rule, model) == ["verifier"]


def test_weights_are_told_apart_and_the_name_of_their_folder_is_not(tmp_path):
    first = own(tmp_path)["policy"]["model_digest"]
    moved = model_in(tmp_path).rename(tmp_path / "moved")
    config = config_for(tmp_path)
    same = identity_of(config, adapter=None, model_path=moved, tasks=TASKS, num_seeds=1)
    assert same["policy"]["model_digest"] == first
    (moved / "model.safetensors").write_bytes(b"weightt")
    other = identity_of(config, adapter=None, model_path=moved, tasks=TASKS, num_seeds=1)
    assert other["policy"]["model_digest"] != first
    assert differences(same, other) == []


def test_recording_and_replaying_the_same_tools_are_alike_and_hints_are_not(tmp_path):
    plain = own(tmp_path)
    replayed = own(tmp_path, "envs.recording.path=results.jsonl", "envs.recording.mode=replay")
    assert differences(plain, replayed) == []
    assert differences(plain, own(tmp_path, "agent.memory=in_process")) == []
    assert differences(plain, own(tmp_path, "agent.memory=in_process", "agent.memory.in_evaluation=true")) == ["memory"]


def test_judges_differ_in_their_settings_and_in_what_they_are_asked(tmp_path, monkeypatch):
    asked = own(tmp_path, "evaluation.judge.model=m")
    assert differences(asked, own(tmp_path, "evaluation.judge.model=m")) == []
    assert differences(asked, own(tmp_path, "evaluation.judge.model=n")) == ["judge"]
    assert differences(asked, own(tmp_path)) == ["judge"]
    monkeypatch.setattr("ray_jobs.evaluation_identity.answer_judge", game24)
    assert differences(asked, own(tmp_path, "evaluation.judge.model=m")) == ["judge"]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes the module `own_code` and forgets what was imported of it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text):
        sys.modules.pop("own_code", None)
        (tmp_path / "own_code.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("own_code", None)


def test_a_tool_of_ones_own_is_its_source_and_not_only_its_name(tmp_path, written):
    weather = 'def weather(city: str) -> str:\n    """The weather of a city."""\n    return "{}"\n'
    settings = ['envs.tools={weather = {source = "own_code:weather"}}', 'envs.actions=["weather", "answer"]']
    found = []
    for text in (weather.format("sun"), "\n" + weather.format("sun"), weather.format("clouds")):
        written(text)
        found.append(own(tmp_path, *settings))
    sun, moved, clouds = found
    assert differences(sun, moved) == []
    assert differences(sun, clouds) == ["tools"]


def test_an_agent_of_ones_own_is_its_source_and_its_settings(tmp_path, written):
    found = []
    for answer, sampling in (("1", "refuse"), ("2", "refuse"), ("2", "override")):
        written(f'async def solve(task, client):\n    return "{answer}"\n')
        settings = ["cold_start.num_demonstrations=0", "reward.credit=outcome", f"agent.sampling={sampling}"]
        found.append(own(tmp_path, "agent.function=own_code:solve", *settings))
    assert differences(found[0], found[1]) == differences(found[1], found[2]) == ["agent"]


def test_code_of_ones_own_is_its_whole_module_but_no_comment(tmp_path, written):
    function = 'def weather(city: str) -> str:\n    """The weather of a city."""\n    return of(city)\n'
    settings = ['envs.tools={weather = {source = "own_code:weather"}}', 'envs.actions=["weather", "answer"]']
    found = []
    for helper in ('def of(city):\n    return "sun"\n', 'def of(city):  # always\n    return "sun"\n', "of = str\n"):
        written(helper + function)
        found.append(own(tmp_path, *settings))
    assert differences(found[0], found[1]) == []
    assert differences(found[0], found[2]) == ["tools"]


def test_a_scorer_of_ones_own_is_its_source_and_what_it_reads_of_a_task(tmp_path, written):
    def scored(text, hint):
        written(f"def score(task, answer):\n    return {text}\n")
        config = config_for(tmp_path)
        tasks = [replace(TASKS[0], scorer="own_code:score", metadata={"hint": hint})]
        return identity_of(config, adapter=None, model_path=model_in(tmp_path), tasks=tasks, num_seeds=1)

    strict = scored("0.0", "a")
    assert differences(strict, scored("1.0", "a")) == ["scorer"]
    assert differences(strict, scored("0.0", "b")) == ["items"]
    assert differences(strict, own(tmp_path)) == ["scorer", "items"]


def test_an_agent_that_is_a_command_is_the_files_that_it_names(tmp_path):
    def asked(script, data):
        (tmp_path / "solve.py").write_text(script)
        (tmp_path / "data.json").write_text(data)
        settings = ["cold_start.num_demonstrations=0", "reward.credit=outcome", f"code_path={tmp_path}"]
        return own(tmp_path, "agent.command=python solve.py --data data.json", *settings)

    first = asked("print(1)", "{}")
    assert differences(first, asked("print(1)", "{}")) == []
    assert differences(first, asked("print(2)", "{}")) == ["agent"]
    assert differences(first, asked("print(1)", "[]")) == ["agent"]


def test_the_questions_that_no_tool_may_bring_are_those_in_their_file(tmp_path):
    def blocked(question):
        (tmp_path / "blocked.txt").write_text(question)
        return own(tmp_path, f"envs.web.blocked_questions={tmp_path / 'blocked.txt'}")

    assert differences(blocked("Who?"), blocked("Where?")) == ["tools"]


def test_identity_is_what_is_read_back(tmp_path):
    identity = own(tmp_path)
    assert json.loads(json.dumps(identity)) == identity
    assert set(FIXED) < set(identity)
