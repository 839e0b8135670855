"""Parts of a running job are killed, stopped or fail; each is replaced, no group is lost and none is trained twice."""

from functools import partial

import pytest
import ray
from doubles import (
    BrokenEngineWorker,
    DyingInAttemptWorker,
    EngineDyingInAttemptWorker,
    GatedLearner,
    GatedWorker,
    HangingEngine,
    KilledWorker,
    MutatingEngine,
    PoisonedWorker,
    SleepingEngine,
    StaleEngine,
    UnloadableEngine,
    WatchedWorker,
    events,
    open_gate,
    worker_with,
)
from ray.cluster_utils import Cluster
from stage import check_law, doubles_found, kill, make_config, open_stage, wait_until

from actors import heartbeat, rollout_worker
from actors.cluster import start_ray
from configs.run import ClusterConfig
from envs.datasets.sampler import evaluation_tasks
from rollout.files import read_records

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

NUM_TASKS = 12
ALL_TASKS = (f"max_tasks={NUM_TASKS}", "num_steps=50")
"""The run ends when all tasks have ended, so that a lost one would show."""


def finish(stage, training, *, restarts, failed=0):
    """Wait for the end of the run; all tasks must have ended."""
    facts = stage.finish(training)
    groups = check_law(stage.folder, facts)
    assert groups["trained"] + groups["filtered"] == NUM_TASKS - failed, groups
    assert (groups["failed"], facts["restarts"]) == (failed, restarts), stage.said
    return facts


@pytest.mark.usefixtures("cluster")
def test_groups_of_a_killed_worker_are_run_again_by_another_process(tmp_path):
    with open_stage(make_config(tmp_path, *ALL_TASKS), build_worker=partial(GatedWorker, folder=tmp_path)) as stage:
        training = stage.reinforce()
        wait_until(lambda: len(events(tmp_path, "begin")) == 4)
        (pid,) = kill("rollout")
        open_gate(tmp_path)
        finish(stage, training, restarts=1)
    assert {one["group"] for one in events(tmp_path, "end") if one["pid"] != pid} >= set(range(NUM_TASKS))
    assert "rollout worker 0 was lost and is replaced" in stage.said


@pytest.mark.parametrize(
    ("build_worker", "depth"),
    [(BrokenEngineWorker, 2), (partial(worker_with, UnloadableEngine), 0)],
    ids=["in a group", "over an adapter while nothing runs"],
)
@pytest.mark.usefixtures("cluster")
def test_worker_whose_engine_died_ends_and_is_replaced(tmp_path, build_worker, depth):
    config = make_config(tmp_path, *ALL_TASKS, f"pipeline_depth={depth}")
    with open_stage(config, build_worker=partial(build_worker, folder=tmp_path)) as stage:
        finish(stage, stage.reinforce(), restarts=1)
    assert len({one["pid"] for one in events(tmp_path, "begin")}) == 2


@pytest.mark.parametrize("is_corrupt", [False, True])
@pytest.mark.usefixtures("cluster")
def test_learner_that_is_killed_continues_from_its_newest_whole_checkpoint(tmp_path, is_corrupt):
    learner = partial(GatedLearner, folder=tmp_path, step=5)
    with open_stage(make_config(tmp_path, *ALL_TASKS), build_learner=learner) as stage:
        training = stage.reinforce()
        wait_until(lambda: events(tmp_path, "gated"))
        newest = sorted(stage.run.folder.checkpoints.glob("v*"))[-1] / "adapter.safetensors"
        if is_corrupt:
            newest.write_bytes(newest.read_bytes()[:-1])
        kill("learner")
        facts = finish(stage, training, restarts=1)
    assert not is_corrupt or str(newest.parent) in stage.said
    trained = [(one["step"], one["groups"]) for one in events(tmp_path, "train")]
    again = 3 if is_corrupt else 5
    assert [step for step, _ in trained] == [1, 2, 3, 4, 5, *range(again, facts["num_steps"] + 1)]
    groups = [group for _, groups in trained[5:] for group in groups]
    assert len(groups) == len(set(groups))


@pytest.mark.parametrize(("worker", "restarts"), [(PoisonedWorker, 0), (KilledWorker, 3)], ids=["raises", "kills"])
@pytest.mark.usefixtures("cluster")
def test_task_that_no_worker_survives_fails_and_the_others_are_trained(tmp_path, worker, restarts):
    config = make_config(tmp_path, *ALL_TASKS, "rollout.max_tries=3", "rollout.engine.max_num_seqs=2")
    with open_stage(config, build_worker=partial(worker, folder=tmp_path)) as stage:
        finish(stage, stage.reinforce(), restarts=restarts, failed=1)


@pytest.mark.usefixtures("cluster")
def test_worker_whose_engine_hangs_is_replaced_though_it_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_EVERY_S", 1.0)
    config = make_config(tmp_path, *ALL_TASKS, "cluster.answer_s=12")
    with open_stage(config, build_worker=partial(worker_with, SleepingEngine, folder=tmp_path)) as stage:
        finish(stage, stage.reinforce(), restarts=1)


# --- wrong weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [MutatingEngine, StaleEngine], ids=["other bytes", "other weights in memory"])
@pytest.mark.usefixtures("cluster")
def test_worker_with_other_weights_is_replaced_and_what_it_sampled_with_them_is_run_again(tmp_path, engine):
    with open_stage(make_config(tmp_path), build_worker=partial(worker_with, engine, folder=tmp_path)) as stage:
        facts = stage.finish(stage.reinforce())
        check_law(stage.folder, facts)
    (fault,) = events(tmp_path, "fault")
    assert (facts["num_steps"], facts["restarts"]) == (5, 1)
    tainted = {one["group"] for one in events(tmp_path, "begin") if one["pid"] == fault["pid"] and one["version"] == 2}
    assert tainted <= {one["group"] for one in events(tmp_path, "begin") if one["pid"] != fault["pid"]}


@pytest.mark.usefixtures("cluster")
def test_worker_that_never_loads_a_version_gets_no_work_and_is_replaced(tmp_path, monkeypatch):
    """The limit is set in the worker's process, where its engine is built."""
    build = partial(impatient, folder=tmp_path)
    with open_stage(make_config(tmp_path, "pipeline_depth=1"), build_worker=build) as stage:
        facts = stage.finish(stage.reinforce())
        check_law(stage.folder, facts)
    (fault,) = events(tmp_path, "fault")
    assert facts["restarts"] == 1
    assert max(one["version"] for one in events(tmp_path, "begin") if one["pid"] == fault["pid"]) <= 1


def impatient(index, *, folder):
    rollout_worker.LOAD_LIMIT_S = 6.0
    return worker_with(HangingEngine, index, folder=folder)


# --- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [DyingInAttemptWorker, EngineDyingInAttemptWorker])
@pytest.mark.usefixtures("cluster")
def test_worker_that_dies_in_evaluations_is_replaced_and_all_attempts_use_their_version(tmp_path, worker):
    config = make_config(
        tmp_path,
        *("evaluation.every_steps=1", "evaluation.num_tasks=8", "evaluation.while_training_tasks=4"),
        *("num_steps=3", "rollout.engine.max_num_seqs=4"),
    )
    with open_stage(config, build_worker=partial(worker, folder=tmp_path)) as stage:
        facts = stage.finish(stage.reinforce())
        check_law(stage.folder, facts)
    rows = [row for row in read_records(stage.folder / "metrics.jsonl") if "held_out/unscored" in row]
    versions = {f"held_out-{row['step']}": row["held_out/policy_version"] for row in rows}
    assert [row["step"] for row in rows] == [1, 2]
    attempts = events(tmp_path, "attempt")
    assert all(one["version"] == versions[one["phase"]] for one in attempts)
    assert {one["task"] for one in attempts} <= {task.id for task in evaluation_tasks(config)}
    assert len({one["pid"] for one in attempts}) == 2
    assert (facts["restarts"], [row["held_out/unscored"] for row in rows]) == (1, [0, 0])


@pytest.mark.usefixtures("cluster")
def test_workers_are_let_go_and_come_back_as_the_file_says(tmp_path):
    config = make_config(tmp_path, "rollout.num_workers=2", "num_steps=40")
    build = partial(WatchedWorker, folder=tmp_path)
    with open_stage(config, build_worker=build, build_learner=partial(GatedLearner, folder=tmp_path, step=5)) as stage:
        training = stage.reinforce()
        wait_until(lambda: events(tmp_path, "gated"))
        (stage.folder / "workers").write_text("1")
        wait_until(lambda: "rollout worker 1 left" in stage.said)
        (stage.folder / "workers").write_text("2")
        wait_until(lambda: "rollout worker 1 joined" in stage.said)
        open_gate(tmp_path)
        facts = stage.finish(training)
        check_law(stage.folder, facts)
    assert facts["restarts"] == 0


# --- machines ------------------------------------------------------------------------------------


@pytest.fixture
def machines():
    """A cluster whose first node has room for the learner and one worker."""
    ray.shutdown()
    with doubles_found():
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        try:
            start_ray(ClusterConfig(address=nodes.address))
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


def test_worker_joins_where_a_node_is_added_and_its_groups_go_back_when_that_is_lost(tmp_path, machines):
    config = make_config(tmp_path, "rollout.max_workers=2", *ALL_TASKS)
    with open_stage(config, build_worker=partial(GatedWorker, folder=tmp_path)) as stage:
        training = stage.reinforce()
        wait_until(lambda: len(events(tmp_path, "begin")) == 4)
        added = machines.add_node(num_cpus=1)
        wait_until(lambda: [one["worker"] for one in events(tmp_path, "begin")[4:]] == [1, 1])
        machines.remove_node(added, allow_graceful=False)
        wait_until(lambda: "without rollout worker 1" in stage.said)
        open_gate(tmp_path)
        finish(stage, training, restarts=1)
    assert {one["worker"] for one in events(tmp_path, "end")} == {0}
