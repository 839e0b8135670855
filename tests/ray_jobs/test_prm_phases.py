from types import SimpleNamespace

import pytest

from configs.run import RunConfig
from envs.datasets.generated import generate
from envs.types import Task
from ray_jobs.prm import CollectedGroups, collect, label, learn_prm, watch_prm
from reward.labels import StepLabel, append_label
from reward.labels.plan import fresh_error
from reward.prm.step_text import step_texts
from rollout.types import Group, StepScores
from tests.changed import replace
from tests.reward.test_step_text import decided, make_trajectory

PLANNED = generate("lookup", split="train", index=0, seed=0).task
UNPLANNED = Task(id="custom-1", dataset="own_text", question="Which one?", answer="this")


class Canaries:
    """A fake of the PRM's actor that records the contexts in which canaries are scored."""

    def __init__(self, *scores):
        self.contexts, self._scores = [], list(scores)
        self.score_canaries = SimpleNamespace(remote=self._score)

    def _score(self, step):
        self.contexts.append(step.trajectory_id)
        return {"thanks": self._scores.pop(0), "flattery": 0.01}


def make_group(name, *scores, task=PLANNED, scored=True):
    """Return a group of one-step trajectories with a wrong answer, which the plan scores 0."""
    trajectories = tuple(
        make_trajectory(decided("answer", "-1", "-1"), task=task, id=f"{name}/{number}", answer="-1")
        for number in range(len(scores))
    )
    group = Group(id=name, trajectories=trajectories)
    if scored:
        StepScores(raw=tuple((score,) for score in scores), prm_digest="d").write_to(group)
    return group


def watch(monkeypatch, groups, *, step, prm):
    monkeypatch.setattr("ray_jobs.prm.ray.get", lambda answers: answers)
    config = RunConfig(reward={"credit": "outcome_gated"})
    run = SimpleNamespace(config=config, supervisor=SimpleNamespace(prm=prm))
    return watch_prm(run, iter(groups), step, 0.5)


def test_error_against_the_plan_is_over_every_scored_step_with_a_plan():
    groups = [make_group("g0", 0.6, 0.6), make_group("g1", 0.1, 0.1), make_group("g2", 0.0, None)]
    assert fresh_error(groups) == {"prm/rejudge_mse": pytest.approx((2 * 0.36 + 2 * 0.01 + 0) / 5)}
    unplanned, unscored = make_group("g3", 0.9, task=UNPLANNED), make_group("g4", 0.9, scored=False)
    assert fresh_error([unplanned, make_group("g5", 0.2), unscored]) == {"prm/rejudge_mse": pytest.approx(0.04)}
    assert fresh_error([unplanned, unscored]) == {}


def test_without_a_prm_no_group_is_read(monkeypatch):
    assert watch(monkeypatch, [None], step=1, prm=None) == {}


def test_canaries_are_scored_once_a_window_in_the_first_scored_context_of_every_group(monkeypatch):
    groups, prm = [make_group("g0", 0.1, 0.1), make_group("g1", 0.1, 0.2)], Canaries(0.2, 0.4)
    failed = replace(groups[1].trajectories[0], turns=(), answer=None)
    groups[1] = replace(groups[1], trajectories=(failed, groups[1].trajectories[1]))
    groups += [make_group("g2", 0.9, scored=False), replace(groups[1], id="g3", trajectories=(failed, failed))]
    assert watch(monkeypatch, groups, step=3, prm=prm) == {"prm/weight": 0.5}
    assert watch(monkeypatch, groups, step=4, prm=prm)["prm/canary_max"] == 0.4
    assert prm.contexts == ["g0/0", "g1/1"]


def test_finished_phases_are_read_from_the_run_folder(tmp_path):
    group, loaded = make_group("g0", 0.1, 0.2, scored=False), []
    folder = SimpleNamespace(collected=tmp_path / "collected", labels=tmp_path / "labels.jsonl", prm=tmp_path / "prm")
    CollectedGroups(folder.collected).add(group)
    known = StepLabel.of(step_texts(group.trajectories[0])[0], labeller="plan", score=0.5)
    append_label(folder.labels, known)
    # There is no engine and no labeller: any work would fail.
    prm = SimpleNamespace(load=loaded.append)
    run = SimpleNamespace(config=RunConfig(), folder=folder, prm=prm, finished=lambda phase: {})
    collected = collect(run)
    labels = label(run, collected)
    learn_prm(run, collected, labels)
    assert [trajectory.id for trajectory in collected] == ["g0/0", "g0/1"]
    assert labels == [known]
    assert loaded == [folder.prm]
