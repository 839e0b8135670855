"""Processes of a running job are stopped, or hang. Each is named, killed and replaced, and nothing is lost."""

from functools import partial

import pytest
import ray
from faults import (
    GatedLearner,
    HangingEngine,
    HangingPrm,
    SleepingEngine,
    WatchedWorker,
    events,
    judged_by,
    open_gate,
    worker_with,
)
from ray_jobs.run.supervisor import Supervisor
from ray_jobs.run.watch import Watch
from stage import check_nothing_lost, local_ray, make_config, open_stage, processes, steps_of, wait_until

from configs.cluster import LivenessConfig
from ray_jobs.run import console, watch

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

NUM_TASKS = 40
SOON = ("liveness.answer_s=12", "liveness.work_s=12", "liveness.start_s=120")
ALL_TASKS = (f"max_tasks={NUM_TASKS}", "num_steps=100", *SOON)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(watch, "BEAT_EVERY_S", 1.0)
    monkeypatch.setattr(watch, "LATE_AFTER_S", 2.0)
    monkeypatch.setattr(console, "SILENCE_S", 6.0)


def stop(part):
    """SIGSTOP the processes of an actor."""
    victims = processes(part)
    assert victims
    for one in victims:
        one.suspend()


def finished(stage, training, *, restarts=1):
    facts = stage.finish(training)
    counts = check_nothing_lost(stage.folder)
    assert (counts.trained + counts.filtered, counts.outstanding) == (NUM_TASKS, 0)
    assert facts["restarts"] == restarts, stage.said


@pytest.mark.parametrize(
    ("part", "name"), [("rollout", "rollout worker 0"), ("learner", "learner"), ("store", "store")]
)
def test_part_that_is_stopped_is_named_killed_and_replaced(tmp_path, part, name):
    learner = partial(GatedLearner, folder=tmp_path, step=3)
    build = partial(WatchedWorker, folder=tmp_path)
    with open_stage(make_config(tmp_path, *ALL_TASKS), build_worker=build, build_learner=learner) as stage:
        training = stage.reinforce()
        wait_until(lambda: events(tmp_path, "gated"))
        stop(part)
        open_gate(tmp_path)
        wait_until(lambda: f"the {name} hangs: " in stage.said)
        finished(stage, training)
        assert "nothing happened for " in stage.said


@pytest.mark.parametrize("engine", [HangingEngine, SleepingEngine], ids=["over an adapter", "in its thread"])
def test_worker_whose_engine_hangs_is_replaced_though_it_answers(tmp_path, engine):
    build = partial(worker_with, engine, folder=tmp_path)
    with open_stage(make_config(tmp_path, *ALL_TASKS), build_worker=build) as stage:
        training = stage.reinforce()
        wait_until(lambda: "the rollout worker 0 hangs: " in stage.said)
        finished(stage, training)


def test_worker_that_is_stopped_as_the_phase_ends_is_replaced(tmp_path, monkeypatch):
    end = Supervisor.__exit__

    def stop_and_end(*arguments):
        stop("rollout")
        return end(*arguments)

    monkeypatch.setattr(Supervisor, "__exit__", stop_and_end)
    config = make_config(tmp_path, *SOON)
    with open_stage(config, build_worker=partial(WatchedWorker, folder=tmp_path)) as stage:
        facts = stage.finish(stage.reinforce())
        check_nothing_lost(stage.folder)
        assert (facts["restarts"], len(processes("rollout"))) == (1, 1)
        assert "waiting for the rollout workers to end; the rollout worker 0 has not answered" in stage.said


def test_worker_that_is_stopped_can_be_let_go(tmp_path, monkeypatch):
    with open_stage(make_config(tmp_path)) as stage:
        stop("rollout")
        stage.run.actors.stop_worker(0)
        wait_until(lambda: not processes("rollout"))


def test_deaths_of_the_store_are_told_and_counted(tmp_path):
    build = partial(WatchedWorker, folder=tmp_path)
    with open_stage(make_config(tmp_path, *ALL_TASKS), build_worker=build) as stage:
        training = stage.reinforce()
        for num in (1, 2):
            wait_until(lambda: len(steps_of(stage.folder)) > 2 * num)  # noqa: B023
            for one in processes("store"):
                one.kill()
            wait_until(lambda: stage.said.count("the store died and was started again") == num)  # noqa: B023
        finished(stage, training, restarts=2)


@pytest.mark.parametrize("answers", [True, False], ids=["and answers", "and does not answer"])
async def test_prm_that_scores_nothing_is_killed_and_the_next_one_scores(tmp_path, answers):
    said = []
    settings = LivenessConfig(answer_s=3, work_s=3, start_s=120)
    with Watch(settings, resume="resume it", note=said.append) as watcher:
        prm = HangingPrm.remote(tmp_path, answers)
        watcher.follow("PRM", prm, kind="PRM", floor_s=3.0, restarts=True)
        scored = await judged_by(prm)
        assert watcher.num_deaths() == 1
        watcher.leave("PRM")
        ray.kill(prm)
    assert {score for row in scored.step_scores.raw for score in row} == {0.7}
    assert "the PRM hangs: it has " in said[0]
