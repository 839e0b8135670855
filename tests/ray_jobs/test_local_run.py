"""The phases of a PRM, as commands in this process and in a resumed run; an engine is loaded only when it is needed."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from evaluating import config_for

from configs.errors import UserError
from configs.run import RunConfig
from learner.checkpoint import write_manifest
from ray_jobs.prm import CollectedGroups, collect, label, learn_prm, run_collect, run_label, run_train_prm
from ray_jobs.run.folder import RunPaths
from reward.labels import StepLabel, append_label, read_labels
from reward.prm.step_text import step_texts
from rollout.types import Group
from tests.reward.test_step_text import decided, make_trajectory, malformed

SMALL = ("envs.mix={lookup=1}", "collect.num_tasks=3", "collect.rollouts_per_task=2")


class ScriptedRollouts:
    """A policy whose first attempt at every task is right. The task of number `failing` breaks the engine."""

    def __init__(self):
        self.opened_for, self.tasks, self.failing = [], [], None

    async def collect_group(self, task, group_id, group_size):
        failed = len(self.tasks) == self.failing
        self.tasks.append(task.id)
        facts = {"task": task, "stop_reason": "infrastructure" if failed else "answered"}
        trajectories = [
            make_trajectory(malformed("hm"), decided("answer", said), id=f"{group_id}/{number}", answer=said, **facts)
            for number, said in enumerate([task.answer, *["-1"] * (group_size - 1)])
        ]
        return Group(id=group_id, trajectories=tuple(trajectories))

    async def continue_from(self, trajectory, num_turns, count):
        return [trajectory] * count


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


def test_missing_and_failed_groups_are_collected_and_no_others(tmp_path, rollouts, capsys):
    rollouts.failing = 1
    run_collect(config_for(tmp_path, *SMALL), None)
    assert "tasks 2, trajectories 4, steps 8, malformed 4, right 2" in capsys.readouterr().out
    failed, rollouts.failing, rollouts.tasks = rollouts.tasks[1], None, []
    run_collect(config_for(tmp_path, *SMALL, "collect.num_tasks=4"), None)
    assert len(rollouts.tasks) == 2
    assert failed in rollouts.tasks
    store = CollectedGroups(tmp_path / "r" / "collected")
    ids = [f"{group_id}/{number}" for group_id in store.group_ids for number in range(2)]
    assert len(store.group_ids) == 4
    assert sorted(trajectory.id for trajectory in store.trajectories()) == sorted(ids)


def test_collect_and_label_commands(tmp_path, rollouts):
    config = config_for(tmp_path, *SMALL, "label.type=monte_carlo", "label.continuations=4")
    run_collect(config, None)
    run_label(config, None, dry_run=True)
    assert rollouts.opened_for == ["monte_carlo"]
    run_label(config, None, dry_run=False)
    assert rollouts.opened_for == ["monte_carlo"] * 2
    assert len(list(read_labels(tmp_path / "r" / "labels.jsonl"))) == 12


def test_trajectories_of_another_policy_are_rejected(tmp_path, rollouts):
    run_collect(config_for(tmp_path, *SMALL), None)
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
            run_collect(config_for(tmp_path, *SMALL, setting), adapter)


class FakePrm:
    """Trains in two steps and scores every step 0.5."""

    def __init__(self, config):
        pass

    def train(self, steps):
        yield from (0.5, 0.25)

    def save(self, folder, facts):
        folder.mkdir()
        return "d1"

    def score(self, steps):
        return [0.5 for _ in steps]


def test_train_prm_command_writes_the_quality(tmp_path, rollouts, monkeypatch, capsys):
    monkeypatch.setattr("ray_jobs.run.local.LocalPrm", FakePrm)
    config = config_for(tmp_path, *SMALL, "label.type=plan")
    run_collect(config, None)
    with pytest.raises(UserError, match="plan"):
        run_train_prm(config)
    run_label(config, None, dry_run=False)
    with pytest.raises(UserError, match="monte_carlo"):
        run_train_prm(config_for(tmp_path, *SMALL, "label.type=monte_carlo"))
    run_train_prm(config)
    quality = json.loads((tmp_path / "r" / "prm_quality.json").read_text())
    assert (quality["digest"], quality["num_tasks_held_out"]) == ("d1", 1)
    assert f"reward.credit.prm_path={tmp_path}/r/prm" in capsys.readouterr().out


def test_finished_phases_are_read_from_the_run_folder(tmp_path):
    trajectories = tuple(make_trajectory(decided("answer", "-1"), id=f"g0/{number}", answer="-1") for number in (0, 1))
    folder = RunPaths(tmp_path)
    CollectedGroups(folder.collected).add(Group(id="g0", trajectories=trajectories))
    known = StepLabel.of(step_texts(trajectories[0])[0], labeller="plan", score=0.5)
    append_label(folder.labels, known)
    # There is no engine, no labeller and no PRM: any work would fail.
    run = SimpleNamespace(config=RunConfig(), folder=folder, finished=lambda phase: {})
    collected = collect(run)
    labels = label(run, collected)
    learn_prm(run, collected, labels)
    assert [trajectory.id for trajectory in collected] == ["g0/0", "g0/1"]
    assert labels == [known]
