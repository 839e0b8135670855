"""Processes of a running job are killed. Nothing may be lost, trained twice or numbered twice."""

import threading
from functools import partial

import pytest
import ray
from faults import (
    GATE,
    BrokenEngineWorker,
    DyingPrm,
    DyingStore,
    DyingWorker,
    GatedLearner,
    GatedWorker,
    HangingToolWorker,
    KilledWorker,
    PoisonedWorker,
    UnloadableEngine,
    WatchedWorker,
    events,
    judged_by,
    open_gate,
    worker_with,
)
from ray_jobs.run.deaths import MAX_DEATHS, CrashLoopError
from ray_jobs.run.supervisor import Supervisor
from stage import (
    check_nothing_lost,
    groups_of,
    kill,
    local_ray,
    make_config,
    open_stage,
    processes,
    steps_of,
    versions_of,
    wait_until,
)

from ray_jobs.run import actors

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

NUM_TASKS = 12
ALL_TASKS = (f"max_tasks={NUM_TASKS}", "num_steps=50")
"""The run ends when every task has come to an end, so that a lost one would show."""


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


def test_groups_of_a_killed_worker_are_run_again_by_another_process(tmp_path):
    with open_stage(make_config(tmp_path, *ALL_TASKS), build_worker=partial(GatedWorker, folder=tmp_path)) as stage:
        training = stage.reinforce()
        wait_until(lambda: len(events(tmp_path, "begin")) == 4)
        lost = {row["ordinal"] for row in stage.groups("running")}
        (pid,) = kill("rollout")
        open_gate(tmp_path)
        facts = stage.finish(training)
        counts = check_nothing_lost(stage.folder)
        rows = stage.groups()
    assert {row["ordinal"]: row["attempt"] for row in rows} == {n: 1 + (n in lost) for n in range(NUM_TASKS)}
    assert {one["group"] for one in events(tmp_path, "end") if one["pid"] != pid} == set(range(NUM_TASKS))
    assert (counts.trained + counts.filtered, counts.outstanding, facts["restarts"]) == (NUM_TASKS, 0, 1)
    assert "the rollout worker 0 was lost and is replaced" in stage.said


@pytest.mark.parametrize(
    ("build_worker", "depth"),
    [(BrokenEngineWorker, 2), (partial(worker_with, UnloadableEngine), 2), (partial(worker_with, UnloadableEngine), 0)],
    ids=["in a group", "over an adapter", "over an adapter while nothing runs"],
)
def test_worker_whose_engine_died_ends_and_is_replaced(tmp_path, build_worker, depth):
    config = make_config(tmp_path, *ALL_TASKS, f"pipeline_depth={depth}")
    with open_stage(config, build_worker=partial(build_worker, folder=tmp_path)) as stage:
        facts = stage.finish(stage.reinforce())
        counts = check_nothing_lost(stage.folder)
    assert (counts.trained + counts.filtered, facts["restarts"]) == (NUM_TASKS, 1)
    assert len({one["pid"] for one in events(tmp_path, "begin")}) == 2


def test_store_is_killed_while_everybody_waits_on_it(tmp_path):
    gated = partial(GatedWorker, folder=tmp_path)
    learner = partial(GatedLearner, folder=tmp_path / "learner", step=2)
    (tmp_path / "learner").mkdir()
    with open_stage(make_config(tmp_path, *ALL_TASKS), build_worker=gated, build_learner=learner) as stage:
        training = stage.reinforce()
        # The learner waits for a batch, the worker for the next version.
        wait_until(lambda: len(events(tmp_path, "begin")) == 4)
        kill("store")
        open_gate(tmp_path)
        # The worker waits for admission: as much is outstanding as may be.
        wait_until(lambda: events(tmp_path / "learner", "gated"))
        wait_until(lambda: not stage.groups("running", "queued") and len(stage.groups("ready", "in_batch")) == 6)
        kill("store")
        open_gate(tmp_path / "learner")
        facts = stage.finish(training)
        counts = check_nothing_lost(stage.folder)
        rows = stage.groups()
    assert (counts.trained + counts.filtered, facts["restarts"]) == (NUM_TASKS, 2)
    assert {row["attempt"] for row in rows} == {1}
    assert len(events(tmp_path, "end")) == NUM_TASKS
    assert versions_of(stage.folder) == list(range(len(steps_of(stage.folder)) + 1))


def test_learner_is_killed_in_a_step_and_what_its_checkpoint_does_not_know_is_trained_again(tmp_path):
    learner = partial(GatedLearner, folder=tmp_path, step=4)
    with open_stage(make_config(tmp_path, *ALL_TASKS), build_learner=learner) as stage:
        training = stage.reinforce()
        wait_until(lambda: events(tmp_path, "gated"))
        kill("learner")
        facts = stage.finish(training)
        counts = check_nothing_lost(stage.folder)
    assert (counts.trained + counts.filtered, facts["restarts"]) == (NUM_TASKS, 1)
    # Steps 3 and 4 came after the checkpoint.
    trained = [(one["step"], one["groups"]) for one in events(tmp_path, "train")]
    assert [step for step, _ in trained] == [1, 2, 3, 4, *range(3, facts["num_steps"] + 1)]
    again = [group for _, groups in trained[4:] for group in groups]
    assert {*trained[2][1], *trained[3][1]} <= set(again)
    assert len(again) == len(set(again))
    # 0 to 3, the one of the new learner, and those of its steps.
    assert versions_of(stage.folder) == list(range(4 + 1 + facts["num_steps"] - 2))


def test_learner_that_dies_again_while_it_comes_back_is_replaced_again(tmp_path):
    learner = partial(GatedLearner, folder=tmp_path, step=4)
    with open_stage(make_config(tmp_path, *ALL_TASKS), build_learner=learner) as stage:
        training = stage.reinforce()
        wait_until(lambda: events(tmp_path, "gated"))
        (first,) = kill("learner")
        wait_until(lambda: "the learner was lost" in stage.said)
        wait_until(lambda: any(one.pid != first for one in processes("learner")))
        kill("learner")
        facts = stage.finish(training)
        check_nothing_lost(stage.folder)
    assert facts["restarts"] == 2


@pytest.mark.parametrize("name", ["adapter.safetensors", "manifest.json"])
def test_corrupt_newest_checkpoint_is_passed_over_for_the_one_before(tmp_path, name):
    learner = partial(GatedLearner, folder=tmp_path, step=5)
    with open_stage(make_config(tmp_path, *ALL_TASKS), build_learner=learner) as stage:
        training = stage.reinforce()
        wait_until(lambda: events(tmp_path, "gated"))
        newest = sorted(stage.run.folder.checkpoints.glob("v*"))[-1]
        (newest / name).write_bytes((newest / name).read_bytes()[:-1])
        kill("learner")
        facts = stage.finish(training)
        counts = check_nothing_lost(stage.folder)
        said = stage.said
    assert (counts.trained, facts["restarts"]) == (NUM_TASKS, 1)
    assert f"passed over a checkpoint: {newest}" in said
    assert [one["step"] for one in events(tmp_path, "train")] == [1, 2, 3, 4, 5, *range(3, facts["num_steps"] + 1)]


def test_task_that_no_worker_survives_fails_with_its_reason_and_training_goes_on(tmp_path):
    config = make_config(tmp_path, *ALL_TASKS, "rollout.max_attempts=3")
    with open_stage(config, build_worker=partial(PoisonedWorker, folder=tmp_path)) as stage:
        facts = stage.finish(stage.reinforce())
        counts = check_nothing_lost(stage.folder)
        (failed,) = stage.groups("failed")
    assert (counts.trained, counts.failed, counts.outstanding) == (NUM_TASKS - 1, 1, 0)
    assert (failed["task"], failed["attempt"]) == (3, 3)
    assert facts["groups"]["reasons"] == {"ValueError: no agent survives this question": 1}
    assert facts["restarts"] == 0


def test_task_that_kills_every_worker_fails_alone_and_all_others_are_trained(tmp_path):
    with open_stage(make_config(tmp_path, *ALL_TASKS), build_worker=partial(KilledWorker, folder=tmp_path)) as stage:
        facts = stage.finish(stage.reinforce())
        counts = check_nothing_lost(stage.folder)
        (failed,) = stage.groups("failed")
    assert (counts.trained, counts.failed, counts.outstanding) == (NUM_TASKS - 1, 1, 0)
    assert (failed["task"], failed["reason"]) == (3, "its worker was lost (ActorDiedError)")
    # Twice beside others, and then alone as often as every group may be tried.
    assert facts["restarts"] == 2 + 6


def test_store_that_dies_as_it_starts_ends_the_run_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(actors, "StoreActor", DyingStore)
    with (
        pytest.raises(CrashLoopError, match=r"the store died 6 times .* `agentflow resume"),
        open_stage(make_config(tmp_path)),
    ):
        raise AssertionError("it has started")


def test_group_whose_tool_hangs_is_ended_by_the_time_limit_and_run_again(tmp_path):
    with open_stage(
        make_config(tmp_path, *ALL_TASKS), build_worker=partial(HangingToolWorker, folder=tmp_path)
    ) as stage:
        facts = stage.finish(stage.reinforce())
        counts = check_nothing_lost(stage.folder)
        rows = stage.groups()
    assert (counts.trained, counts.failed) == (NUM_TASKS, 0)
    assert [row["task"] for row in rows if row["attempt"] > 1] == [3]
    assert facts["groups"]["requeued"] == 1


def test_worker_that_always_dies_ends_the_run_with_the_reason(tmp_path):
    config = make_config(tmp_path, "rollout.max_attempts=100")
    with open_stage(config, build_worker=partial(DyingWorker, folder=tmp_path)) as stage:
        with pytest.raises(
            CrashLoopError, match=r"the rollout worker 0 died 6 times .* rollout worker 0: .* `agentflow resume"
        ):
            stage.finish(stage.reinforce())
        assert len({one["pid"] for one in events(tmp_path, "begin")}) == MAX_DEATHS + 1


def test_worker_that_dies_as_the_phase_ends_is_there_for_the_next_one(tmp_path, monkeypatch):
    before_the_end(monkeypatch, lambda: kill("rollout"))
    with open_stage(make_config(tmp_path), build_worker=partial(WatchedWorker, folder=tmp_path)) as stage:
        facts = stage.finish(stage.reinforce())
        check_nothing_lost(stage.folder)
        assert (facts["restarts"], len(processes("rollout"))) == (1, 1)


def test_store_that_forgot_that_the_phase_ended_is_told_again(tmp_path, monkeypatch):
    def kill_later():
        """When it was told, and before the worker, all of whose places are taken, has asked it."""
        (tmp_path / GATE).unlink()
        wait_until(lambda: len(groups_of(tmp_path / "r", "running")) == 4)
        threading.Timer(3.0, lambda: (kill("store"), open_gate(tmp_path))).start()

    before_the_end(monkeypatch, kill_later)
    open_gate(tmp_path)
    config = make_config(tmp_path, "pipeline_depth=20")
    with open_stage(config, build_worker=partial(GatedWorker, folder=tmp_path)) as stage:
        stage.finish(stage.reinforce())
        check_nothing_lost(stage.folder)


def before_the_end(monkeypatch, act):
    """Have `act` called after the last step, before the workers are told to end."""
    end = Supervisor.__exit__

    def act_and_end(*arguments):
        act()
        return end(*arguments)

    monkeypatch.setattr(Supervisor, "__exit__", act_and_end)


@pytest.mark.parametrize(("num_deaths", "scores"), [(1, 0.7), (2, 0.7), (9, None)])
async def test_group_is_scored_by_the_prm_that_was_started_again_and_never_with_zeros(tmp_path, num_deaths, scores):
    prm = DyingPrm.remote(tmp_path, num_deaths)
    scored = await judged_by(prm, delays_s=(0.1, 1.0, 5.0, 15.0, 30.0) if scores else (0.1, 0.1))
    assert {score for row in scored.step_scores.raw for score in row} == {scores}
    assert scored.step_scores.prm_digest == ("d" if scores else "")
    ray.kill(prm)
