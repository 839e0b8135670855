import pytest
from ollama_protocol import ScriptedOllama, said, serving
from scripted import decision

from configs.errors import UserError
from configs.loading import load_run_config
from ray_jobs.cli import main
from ray_jobs.solve import run_solve
from rollout.codec import read_trajectories

ACTIONS = 'envs.actions=["think", "answer"]'


def solve(url, *arguments):
    return main(
        ["solve", "What is 6*7?", "--backend", "ollama:planner", f"backend.base_url={url}", ACTIONS, *arguments]
    )


def test_solve_command_over_ollama(tmp_path, capsys):
    ollama, trace = ScriptedOllama(), tmp_path / "trace.jsonl"
    ollama.replies = [said(decision("think", "6*7=42")), said(decision("answer", "42"))] * 2
    with serving(ollama) as url:
        assert solve(url, "--trace", str(trace)) == 0
        assert solve(url, "--trace", str(trace)) == 0
    assert "answer 42" in capsys.readouterr().out
    trajectory, second = read_trajectories(trace)
    assert (trajectory.phase, trajectory.reward, second.answer) == ("solve", None, "42")
    assert (trajectory.answer, trajectory.task.question, trajectory.served) == ("42", "What is 6*7?", True)
    assert [turn.tool_call.name for turn in trajectory.turns] == ["think", "answer"]
    assert ollama.faults == []


def test_solve_removes_control_characters(capsys):
    ollama, hostile = ScriptedOllama(), "a\\u001b]52;c;aGk=\\u0007\\u001b[2Jb\\u009b31mc"
    ollama.replies = [said(decision("think", hostile, hostile)), said(decision("answer", hostile))]
    with serving(ollama) as url:
        assert solve(url) == 0
    out = capsys.readouterr().out
    assert "answer a]52;c;aGk=b31mc" in out
    assert not {"\x1b", "\x07", "\x9b"} & {*out}


@pytest.mark.parametrize("question", ["", " \n"])
def test_empty_question_is_refused_before_an_engine_is_loaded(question, monkeypatch):
    monkeypatch.setattr("ray_jobs.solve.open_worker", None)
    with pytest.raises(UserError):
        run_solve(load_run_config(None), question, None, None)
