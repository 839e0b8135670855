"""The phases of a PRM, as commands in this process and in a resumed run; an engine is loaded only when it is needed."""

import asyncio
import json
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from evaluating import config_for
from msgspec import structs

from configs.errors import UserError
from configs.run import RunConfig
from learner.checkpoint import write_manifest
from ray_jobs.prm import (
    CollectedGroups,
    collect,
    label,
    learn_prm,
    prepare_prm,
    run_train_prm,
)
from ray_jobs.run.folder import RunPaths
from ray_jobs.run.local import LocalRun
from reward.judge_client import Bill
from reward.labels import StepLabel, append_label, read_labels
from reward.labels.judge import judge_name
from reward.labels.search import CANDIDATES
from reward.prm.step_text import step_texts
from rollout.types import Group
from tests.reward.test_step_text import decided, make_trajectory, malformed

SMALL = ("envs.mix={lookup=1}", "collect.num_tasks=3", "collect.rollouts_per_task=2", "label.type=plan")


class ScriptedRollouts:
    """A policy whose first attempt at every task but differences is right. Task number `failing` breaks the engine."""

    def __init__(self):
        self.opened_for, self.tasks, self.failing, self.searched = [], [], None, defaultdict(list)

    async def collect_group(self, task, group_id, group_size):
        failed = len(self.tasks) == self.failing
        self.tasks.append(task.id)
        facts = {"task": task, "stop_reason": "infrastructure" if failed else "answered"}
        trajectories = [
            make_trajectory(malformed("hm"), decided("answer", said), id=f"{group_id}/{number}", answer=said, **facts)
            for number, said in enumerate([wrong_if_difference(task), *["-1"] * (group_size - 1)])
        ]
        return Group(id=group_id, trajectories=tuple(trajectories))

    async def continue_from(self, trajectory, num_turns, count):
        wrong = make_trajectory(decided("answer", "-1"), id="new", task=trajectory.task, answer="-1")
        return [wrong] * count

    async def search(self, trajectory, num_turns, group_id, score_steps, candidates):
        """After each prefix a policy gives up, or takes one of three steps to the right answer."""
        task, prefix = trajectory.task, trajectory.turns[:num_turns]
        self.searched[task.id].append((num_turns, candidates))
        if num_turns == 4:
            end = make_trajectory(*prefix, task=task, answer=task.answer, id=group_id)
            return [structs.replace(end, group_id=group_id)], 0
        right = decided("answer", task.answer) if num_turns == 3 else decided("think", f"right {num_turns}")
        wrong = decided("answer", "-1")
        ends = [
            make_trajectory(*prefix, end, task=task, answer=None, id=f"{group_id}/{number}")
            for number, end in enumerate((right, wrong))
        ]
        scores = await score_steps(Group(id="", trajectories=tuple(ends)))
        found = [one for one, raw in zip(ends, scores.raw, strict=True) if raw[-1] is None]
        attempt = make_trajectory(*prefix, wrong, task=task, answer="-1", id=group_id)
        return [structs.replace(one, group_id=group_id) for one in (attempt, *found)], 10


def wrong_if_difference(task):
    return "-1" if task.dataset == "difference" else task.answer


@pytest.fixture
def rollouts(monkeypatch):
    """The policy of every engine that is opened."""
    rollouts = ScriptedRollouts()

    @contextmanager
    def open_scripted(config, adapter):
        rollouts.opened_for.append(config.label.type)
        yield rollouts

    monkeypatch.setattr("ray_jobs.run.local.open_policy", open_scripted)
    return rollouts


class FakePrm:
    """Trains in two steps and scores every step 0.5."""

    def __init__(self, config):
        self.trained = []

    def train(self, steps):
        self.trained.append(steps)
        yield from (0.5, 0.25)

    def save(self, folder, facts):
        folder.mkdir(exist_ok=True)
        return "d1"

    def score(self, steps):
        return [0.5 for _ in steps]


@pytest.fixture
def prm(monkeypatch):
    monkeypatch.setattr("ray_jobs.run.local.LocalPrm", FakePrm)


def test_missing_and_failed_groups_are_collected_and_no_others(tmp_path, rollouts, prm, capsys):
    rollouts.failing = 1
    run_train_prm(config_for(tmp_path, *SMALL), None)
    assert "tasks 2, trajectories 4, steps 8, malformed 4, right 2" in capsys.readouterr().out
    failed, rollouts.failing, rollouts.tasks = rollouts.tasks[1], None, []
    run_train_prm(config_for(tmp_path, *SMALL, "collect.num_tasks=4"), None)
    assert len(rollouts.tasks) == 2
    assert failed in rollouts.tasks
    store = CollectedGroups(tmp_path / "r" / "collected")
    ids = [f"{group_id}/{number}" for group_id in store.group_ids for number in range(2)]
    assert len(store.group_ids) == 4
    assert sorted(trajectory.id for trajectory in store.trajectories()) == sorted(ids)


def test_trajectories_of_another_policy_are_rejected(tmp_path, rollouts, prm):
    run_train_prm(config_for(tmp_path, *SMALL), None)
    checkpoint = tmp_path / "v000003"
    checkpoint.mkdir()
    (checkpoint / "adapter.safetensors").write_bytes(b"weights")
    write_manifest(checkpoint, policy_version=3, step=3)
    for adapter, setting, other in (
        (checkpoint, "seed=0", "adapter"),
        (None, "collect.temperature=0.5", "collect.temperature"),
        (None, "collect.rollouts_per_task=3", "collect.rollouts_per_task"),
    ):
        with pytest.raises(UserError, match=other):
            run_train_prm(config_for(tmp_path, *SMALL, setting), adapter)


def test_folder_of_a_training_run_is_rejected(tmp_path, rollouts, prm):
    config = config_for(tmp_path, *SMALL)
    config.run_path.mkdir()
    (config.run_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="name="):
        run_train_prm(config, None)
    assert rollouts.tasks == []


def test_train_prm_command_writes_the_quality(tmp_path, rollouts, prm, capsys):
    run_train_prm(config_for(tmp_path, *SMALL), None)
    quality = json.loads((tmp_path / "r" / "prm_quality.json").read_text())
    assert (quality["digest"], quality["num_tasks_held_out"]) == ("d1", 1)
    assert f"reward.credit.prm_path={tmp_path}/r/prm" in capsys.readouterr().out
    assert len(list(read_labels(tmp_path / "r" / "labels.jsonl"))) == 12


DIFFERENCES = ("envs.mix={lookup=1, difference=1}", "collect.num_tasks=8")
JUDGE = 'label={type="judge", judge={model="m", base_url="http://127.0.0.1:9/v1"}}'


class ScriptedJudge:
    """Calls every thought right, and an answer if it follows from three."""

    def __init__(self, config):
        self.name = judge_name(config.label.judge)
        self.client = SimpleNamespace(spent=Bill())

    async def label(self, step):
        is_right = "Action: think" in step.decision or len(step.context) == 6
        return StepLabel.of(step, labeller=self.name, score=float(is_right))


def test_right_steps_are_searched_for_where_no_attempt_is_right_and_the_prm_learns_them(
    tmp_path, rollouts, prm, monkeypatch
):
    config = config_for(tmp_path, *DIFFERENCES, JUDGE)
    judge = ScriptedJudge(config)
    monkeypatch.setattr("ray_jobs.prm.labeller_of", lambda run, collected: judge)
    with LocalRun(config) as run:
        prepare_prm(run)
        prepare_prm(run)
        first, again = ({one.step.trajectory_id for one in steps} for steps in run.prm.trained)
    differences = {task for task in rollouts.tasks if "difference" in task}
    assert rollouts.searched.keys() <= differences
    assert rollouts.searched
    first_size = CANDIDATES[0]
    for visits in rollouts.searched.values():
        assert visits == [(number, first_size) for number in range(5)]
    assert first == again
    assert {one.split("/")[1] for one in first if one.startswith("deepen/")} == {"0", "1", "2", "3"}
    deepened = list(CollectedGroups(tmp_path / "r" / "deepened").trajectories())
    assert len({one.id for one in deepened}) == len(deepened)


def test_an_agent_that_repeats_no_attempt_ends_the_search(tmp_path, rollouts, prm, monkeypatch):
    config = config_for(tmp_path, *DIFFERENCES, JUDGE)
    judge = ScriptedJudge(config)
    monkeypatch.setattr("ray_jobs.prm.labeller_of", lambda run, collected: judge)

    async def fails(trajectory, num_turns, group_id, score_steps, candidates):
        return [structs.replace(trajectory, id=group_id, stop_reason="infrastructure", failure="not repeated")], 0

    monkeypatch.setattr(rollouts, "search", fails)
    with LocalRun(config) as run, pytest.raises(UserError, match="not repeated"):
        prepare_prm(run)


@pytest.mark.parametrize("labels", ["monte_carlo", "plan"])
def test_no_steps_are_searched_for_with_labels_of_executed_steps(tmp_path, rollouts, prm, labels):
    with LocalRun(config_for(tmp_path, *DIFFERENCES, f"label.type={labels}")) as run:
        prepare_prm(run)
    assert not (tmp_path / "r" / "deepened").exists()


def test_finished_phases_are_read_from_the_run_folder(tmp_path):
    trajectories = tuple(make_trajectory(decided("answer", "-1"), id=f"g0/{number}", answer="-1") for number in (0, 1))
    folder = RunPaths(tmp_path)
    asyncio.run(CollectedGroups(folder.collected).add(Group(id="g0", trajectories=trajectories)))
    known = StepLabel.of(step_texts(trajectories[0])[0], labeller="plan", score=0.5)
    append_label(folder.labels, known)
    # There is no engine, no labeller and no PRM: any work would fail.
    run = SimpleNamespace(config=RunConfig(), folder=folder, finished=lambda phase: {})
    collected = collect(run)
    label(run, collected)
    learn_prm(run, collected)
    assert [trajectory.id for trajectory in collected] == ["g0/0", "g0/1"]
    assert list(read_labels(folder.labels)) == [known]
