from types import SimpleNamespace

import pytest

from configs.run import RunConfig
from envs.datasets.generated import generate
from envs.types import Task
from ray_jobs.phases.collect import collect
from ray_jobs.phases.label import label
from ray_jobs.phases.prm import learn_prm, watch_prm
from reward.collected import CollectedGroups
from reward.labels import StepLabel, append_label
from reward.labels.plan import fresh_error
from reward.prm.step_text import step_texts
from rollout.types import Group, Reward, StepScores
from tests.ray_jobs.view_world import make_trajectory, make_turn

PLANNED = generate("lookup", split="train", index=0, seed=0).task
UNPLANNED = Task(id="own-1", dataset="own_text", question="Which one?", answer="this")


class Canaries:
    """Stands for the PRM's actor; remembers in whose contexts it was asked."""

    def __init__(self, *scores):
        self.asked, self._scores = [], list(scores)

    @property
    def score_canaries(self):
        return SimpleNamespace(remote=self._score)

    def _score(self, step):
        self.asked.append(step.trajectory_id)
        return {"thanks": self._scores.pop(0), "flattery": 0.01}


def make_group(name, *scores, task=PLANNED, scored=True):
    """One trajectory a score, each of one wrong answer, which the plan gives 0."""
    trajectories = tuple(
        make_trajectory(
            number, group=name, task=task, turns=(make_turn(action="answer", text="-1", result="-1"),), answer="-1"
        )
        for number in range(len(scores))
    )
    group = Group(id=name, trajectories=trajectories)
    for trajectory in trajectories:
        trajectory.reward = Reward(outcome=0.0, total=0.0)
    if scored:
        StepScores(raw=tuple((score,) for score in scores), prm_digest="d").write_to(group)
    return group


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch):
    monkeypatch.setattr("ray_jobs.phases.prm.ray.get", lambda answers: answers)


@pytest.fixture
def watch():
    def watched(groups, *, step=1, prm=None):
        run = SimpleNamespace(config=RunConfig(), supervisor=SimpleNamespace(prm=prm or Canaries(*[0.1] * 9)))
        return watch_prm(run, groups, step, 0.5)

    return watched


def test_error_against_the_plan_is_over_every_group_of_the_batch():
    groups = [make_group("g0", 0.6, 0.6), make_group("g1", 0.1, 0.1), make_group("g2", 0.0, None)]
    assert fresh_error(groups) == {"prm/rejudge_mse": pytest.approx((2 * 0.36 + 2 * 0.01 + 0) / 5)}


def test_without_a_prm_no_group_is_read():
    run = SimpleNamespace(config=RunConfig(), supervisor=SimpleNamespace(prm=None))
    assert watch_prm(run, iter([None]), 1, 0.5) == {}


def test_groups_without_a_plan_or_without_scores_are_left_out():
    groups = [make_group("g0", 0.9, task=UNPLANNED), make_group("g1", 0.2), make_group("g2", 0.9, scored=False)]
    assert fresh_error(groups) == {"prm/rejudge_mse": pytest.approx(0.04)}
    assert fresh_error(groups[:1]) == {}
    assert fresh_error(groups[2:]) == {}


def test_canaries_are_asked_once_a_window_in_a_context_of_every_group(watch):
    groups, prm = [make_group("g0", 0.1, 0.1), make_group("g1", 0.1)], Canaries(0.2, 0.4)
    groups.append(make_group("g2", 0.9, scored=False))
    assert watch(groups, step=3, prm=prm) == {"prm/weight": 0.5}
    assert watch(groups, step=4, prm=prm)["prm/canary_max"] == 0.4
    assert prm.asked == ["g0/0", "g1/0"]


def test_a_group_whose_first_attempt_failed_before_its_first_step_is_asked_about_by_the_next(watch):
    """Regression: an attempt without a step ended the run with an IndexError, and again at every resume."""
    mixed, empty = make_group("g0", 0.1, 0.2), make_group("g1", 0.1, 0.2)
    for attempt in (mixed.trajectories[0], *empty.trajectories):
        attempt.turns = ()
    prm = Canaries(0.4)
    assert watch([mixed, empty], step=4, prm=prm)["prm/canary_max"] == 0.4
    assert prm.asked == ["g0/1"]


def test_phases_that_ended_before_a_kill_are_read_and_ask_nobody_again(tmp_path):
    """Whoever would collect, label or train is not there."""
    group = make_group("g0", 0.1, 0.2)
    CollectedGroups(tmp_path / "collected").add(group)
    given = StepLabel.of(step_texts(group.trajectories[0])[0], labeller="plan", score=0.5)
    append_label(tmp_path / "labels.jsonl", given)
    loaded = []
    folder = SimpleNamespace(collected=tmp_path / "collected", labels=tmp_path / "labels.jsonl", prm=tmp_path / "prm")
    prm = SimpleNamespace(load=loaded.append)
    run = SimpleNamespace(config=RunConfig(), folder=folder, prm=prm, finished=lambda phase: {})
    collected = collect(run)
    labels = label(run, collected)
    learn_prm(run, collected, labels)
    assert [one.id for one in collected] == ["g0/0", "g0/1"]
    assert labels == [given]
    assert loaded == [tmp_path / "prm"]
