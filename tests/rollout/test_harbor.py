"""Tasks in Harbor's format: what is a task, who plays it, and what its verifier's word becomes."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from endpoint_play import play_agent, until
from scripted import make_task

from configs.envs import OwnDatasetConfig
from configs.plugins import OwnCodeError
from envs.datasets.own import module_tasks
from rollout.agent.harbor import HarborTasks

SCRIPTED = Path(__file__).with_name("scripted_harbor.py")


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "bin" / "harbor"
    file.parent.mkdir()
    file.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(SCRIPTED))} "$@"\n')
    file.chmod(0o755)
    return str(file)


def make_folder(folder, *, expected="blue", instruction="Name a colour.", script="", settings=""):
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(settings)
    (folder / "instruction.md").write_text(f"{instruction}\n")
    (folder / "tests" / "expected").write_text(expected)
    if script:
        (folder / "script").write_text(script)
    return folder


def task_of(number=0):
    return replace(make_task(), id=f"colours-{number}")


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_folder_with_a_task_is_one_and_equal_instructions_are_told_apart(tmp_path, program):
    for name in ("b/deep", "a"):
        make_folder(tmp_path / "train" / name)
    make_folder(tmp_path / "held" / "c", instruction="Name a fruit.")
    colours = HarborTasks(tmp_path / "train", held_out=tmp_path / "held", program=program)
    rows = [(row["id"], row["question"], row["split"]) for row in colours.tasks()]
    assert rows == [
        (0, "Name a colour.", "train"),
        (1, "Name a colour. [deep]", "train"),
        (2, "Name a fruit.", "eval"),
    ]
    assert {row["split"] for row in HarborTasks(tmp_path / "train", program=program).tasks()} == {None}
    assert {colours.score(task_of(), row["answer"]) for row in colours.tasks()} == {1.0}


def test_folders_of_one_instruction_are_in_one_part(tmp_path, program, monkeypatch):
    """Regression: the folder's name, which tells them apart, chose another half for each."""
    for number in range(12):
        make_folder(tmp_path / "tasks" / f"fix-{number}", expected=str(number))
    module = ModuleType("harbor_of_the_test")
    module.tasks = HarborTasks(tmp_path / "tasks", program=program).tasks
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = module_tasks("h", OwnDatasetConfig(source=f"{module.__name__}:tasks"), with_teacher=True)
    assert sorted(map(len, found.values())) == [0, 0, 0, 12]


def test_a_task_in_both_folders_is_refused_and_one_with_other_files_is_not(tmp_path, program):
    make_folder(tmp_path / "train" / "a")
    make_folder(tmp_path / "held" / "b", expected="red")
    HarborTasks(tmp_path / "train", held_out=tmp_path / "held", program=program)
    make_folder(tmp_path / "held" / "same", instruction="name a  colour")
    with pytest.raises(OwnCodeError, match=r"held/same' is held out and .*train/a' trained on, and they are one task"):
        HarborTasks(tmp_path / "train", held_out=tmp_path / "held", program=program)


async def test_a_trial_asks_the_attempts_endpoint_and_its_verifier_gives_the_score(tmp_path, program):
    make_folder(tmp_path / "tasks" / "a")
    folder = make_folder(tmp_path / "tasks" / "b", expected="red")
    colours = HarborTasks(tmp_path / "tasks", agent="mine:Agent", options=("--env", "podman"), program=program)
    right, engine = await play_agent(colours.solve, task_of(1), "red")
    wrong, _ = await play_agent(colours.solve, task_of(1), "blue")
    assert (right.failure, len(right.turns), len(engine.requests)) == (None, 1, 1)
    assert [colours.score(task_of(1), one.answer) for one in (right, wrong)] == [1.0, 0.0]
    seen = json.loads((folder / "seen").read_text())
    assert (seen["agent"], seen["env"]) == ("mine:Agent", "podman")


async def test_harbor_knows_no_secret_of_the_worker_but_what_is_named(tmp_path, program, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    monkeypatch.setenv("DAYTONA_API_KEY", "named")
    folder = make_folder(tmp_path / "tasks" / "a")
    colours = HarborTasks(tmp_path / "tasks", variables=("DAYTONA_API_KEY",), program=program)
    await play_agent(colours.solve, task_of(), "blue")
    environment = json.loads((folder / "seen").read_text())["environment"]
    assert ("JUDGE_API_KEY" in environment, environment["DAYTONA_API_KEY"]) == (False, "named")


async def test_another_number_of_the_verifier_may_be_the_reward(tmp_path, program):
    make_folder(tmp_path / "tasks" / "a")
    lengths = HarborTasks(tmp_path / "tasks", reward="length", program=program)
    trajectory, _ = await play_agent(lengths.solve, task_of(), "x")
    assert lengths.score(task_of(), trajectory.answer) == 1.0
    absent = HarborTasks(tmp_path / "tasks", reward="style", program=program)
    with pytest.raises(ValueError, match=r"gave \['length', 'reward'\] and no 'style'"):
        absent.score(task_of(), trajectory.answer)


@pytest.mark.parametrize(
    ("script", "reason"),
    [("fails", "AgentTimeoutError: after 9 s"), ("says nothing", "Harbor made no trial: No such task")],
)
async def test_a_trial_without_a_verdict_leaves_its_attempt_unscored_with_harbors_reason(
    tmp_path, program, script, reason
):
    make_folder(tmp_path / "tasks" / "a", script=script)
    trajectory, _ = await play_agent(HarborTasks(tmp_path / "tasks", program=program).solve, task_of(), "blue")
    assert reason in trajectory.failure


async def test_an_agent_whose_time_was_over_is_scored_where_its_verifier_ran(tmp_path, program):
    make_folder(tmp_path / "tasks" / "a", script="is slow")
    colours = HarborTasks(tmp_path / "tasks", program=program)
    trajectory, _ = await play_agent(colours.solve, task_of(), "blue")
    assert (trajectory.failure, colours.score(task_of(), trajectory.answer)) == (None, 1.0)


async def test_of_a_trial_that_takes_too_long_nothing_is_left(tmp_path, program):
    folder = make_folder(tmp_path / "tasks" / "a", script="hangs")
    trajectory, _ = await play_agent(HarborTasks(tmp_path / "tasks", program=program).solve, task_of(), timeout_s=10)
    assert "the agent took longer" in trajectory.failure
    daemon = int((folder / "daemon").read_text())
    await until(lambda: not alive(daemon))
    assert (folder / "taken down").exists()


async def test_a_trial_is_over_though_it_leaves_a_daemon_that_could_still_print(tmp_path, program):
    folder = make_folder(tmp_path / "tasks" / "a", script="leaves a daemon")
    colours = HarborTasks(tmp_path / "tasks", program=program)
    trajectory, _ = await play_agent(colours.solve, task_of(), "blue")
    assert (trajectory.failure, colours.score(task_of(), trajectory.answer)) == (None, 1.0)
    assert not alive(int((folder / "daemon").read_text()))


def test_what_cannot_be_played_is_refused_before_anything_starts(tmp_path, program):
    with pytest.raises(OwnCodeError, match="there is no program 'no-harbor'; Harbor comes by `uv tool install harbor`"):
        HarborTasks(tmp_path, program="no-harbor")
    with pytest.raises(OwnCodeError, match="has no task of Harbor's"):
        HarborTasks(tmp_path, program=program)
    folder = make_folder(tmp_path / "tasks" / "a", settings='[[steps]]\nname = "first"\n')
    with pytest.raises(OwnCodeError, match="has several steps"):
        HarborTasks(tmp_path / "tasks", program=program)
    (folder / "task.toml").write_text("")
    (folder / "instruction.md").unlink()
    with pytest.raises(OwnCodeError, match=r"has no instruction.md"):
        HarborTasks(tmp_path / "tasks", program=program)
