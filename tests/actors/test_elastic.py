"""Machines come and go while a run goes on."""

import threading
import time
from functools import partial

import pytest
from faults import GatedLearner, GatedWorker, WatchedWorker, events, open_gate
from ray.cluster_utils import Cluster
from ray_jobs.run.actors import NoRoomError
from stage import (
    check_nothing_lost,
    doubles_found,
    local_ray,
    make_config,
    open_stage,
    processes,
    steps_of,
    wait_until,
)

from actors.cluster import start_ray, stop_ray
from configs.cluster import ClusterConfig
from ray_jobs import train
from ray_jobs.run import supervisor

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]


@pytest.fixture
def machines():
    """A first machine, with room for the learner and one worker."""
    with doubles_found():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        start_ray(ClusterConfig(address=cluster.address))
        yield cluster
        stop_ray()
        cluster.shutdown()


def test_worker_joins_a_run_where_a_machine_is_added_and_its_groups_go_back_when_that_is_lost(tmp_path, machines):
    config = make_config(tmp_path, "rollout.max_workers=2", "max_tasks=16", "num_steps=50")
    with open_stage(config, build_worker=partial(GatedWorker, folder=tmp_path)) as stage:
        training = stage.reinforce()
        wait_until(lambda: len(events(tmp_path, "begin")) == 4)
        added = machines.add_node(num_cpus=1)
        # Four groups run on the first worker; the two more that may be live are the second one's.
        wait_until(lambda: [one["worker"] for one in events(tmp_path, "begin")[4:]] == [1, 1])
        assert "rollout worker 1 joined" in stage.said
        lost = {one["group"] for one in events(tmp_path, "begin")[4:]}
        machines.remove_node(added, allow_graceful=False)
        wait_until(lambda: "going on without rollout worker 1" in stage.said)
        open_gate(tmp_path)
        facts = stage.finish(training)
        counts = check_nothing_lost(stage.folder)
        rows = stage.groups()
    assert (counts.trained, counts.outstanding, facts["restarts"]) == (16, 0, 1)
    assert {row["ordinal"] for row in rows if row["attempt"] > 1} == lost
    assert {one["worker"] for one in events(tmp_path, "end")} == {0}


def test_learner_whose_machine_is_lost_ends_the_run_where_no_other_has_room(tmp_path):
    config = make_config(tmp_path, "num_steps=50", "cluster.patience_s=20")
    learner = partial(GatedLearner, folder=tmp_path, step=2)
    with doubles_found():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        try:
            nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
            start_ray(ClusterConfig(address=cluster.address))
            with open_stage(config, build_learner=learner) as stage:
                training = stage.reinforce()
                wait_until(lambda: events(tmp_path, "gated"))
                (lost,) = (one for one in nodes if one.node_id != stage.run.actors.node_of(0))
                cluster.remove_node(lost, allow_graceful=False)
                with pytest.raises(NoRoomError, match="no room for the learner"):
                    stage.finish(training)
        finally:
            stop_ray()
            cluster.shutdown()


@pytest.fixture
def many_cores():
    with local_ray(num_cpus=8):
        yield


def want(stage, num):
    (stage.folder / "workers").write_text(str(num))


def begun_by(folder, since):
    return {one["worker"] for one in events(folder, "begin")[since:]}


@pytest.fixture
def until_told(monkeypatch):
    """The run makes train steps until this is set."""
    told = threading.Event()
    monkeypatch.setattr(train, "train_step", lambda *what, step=train.train_step: not told.is_set() and step(*what))
    return told


@pytest.mark.parametrize("replaced", [None, 0], ids=["as they were started", "after worker 0 was replaced"])
def test_workers_are_let_go_and_come_back_as_the_file_says(tmp_path, many_cores, monkeypatch, until_told, replaced):
    """More than the patience with workers that do not follow goes by after some were let go."""
    monkeypatch.setattr(supervisor, "PROOF_PATIENCE_S", 8.0)
    config = make_config(tmp_path, "rollout.num_workers=4", "num_steps=100000")
    with open_stage(config, build_worker=partial(WatchedWorker, folder=tmp_path)) as stage:
        training = stage.reinforce()
        wait_until(lambda: len(steps_of(stage.folder)) > 3)
        if replaced is not None:
            (victim,) = {one["pid"] for one in events(tmp_path, "begin") if one["worker"] == replaced}
            next(one for one in processes("rollout") if one.pid == victim).kill()
            wait_until(lambda: {row["worker"] for row in stage.groups("running")} >= {1} and "was lost" in stage.said)
            wait_until(lambda: len(processes("rollout")) == 4)
        want(stage, 1)
        wait_until(lambda: len(processes("rollout")) == 1)
        # All of the places are its.
        wait_until(lambda: [row["worker"] for row in stage.groups("running")] == [0] * 4)
        pids, since = {one.pid for one in processes("rollout")}, len(events(tmp_path, "begin"))
        time.sleep(2 * supervisor.PROOF_PATIENCE_S)
        assert {one.pid for one in processes("rollout")} == pids
        assert begun_by(tmp_path, since) == {0}
        want(stage, 3)
        wait_until(lambda: begun_by(tmp_path, since) == {0, 1, 2})
        until_told.set()
        facts = stage.finish(training)
        check_nothing_lost(stage.folder)
        said = stage.said
    assert said.count("joined") == 2
    assert facts["restarts"] == said.count("was lost") == (replaced is not None)


def test_workers_that_are_lost_together_are_one_event_and_not_a_crash_loop(tmp_path, many_cores):
    """The learner's step takes longer than all of it, as those of a GPU do."""
    config = make_config(tmp_path, "rollout.num_workers=7", "batch_groups=4", "max_tasks=40", "num_steps=50")
    learner = partial(GatedLearner, folder=tmp_path, step=2)
    with open_stage(config, build_worker=partial(WatchedWorker, folder=tmp_path), build_learner=learner) as stage:
        training = stage.reinforce()
        wait_until(lambda: events(tmp_path, "gated"))
        victims = processes("rollout")[:6]
        for one in victims:
            one.kill()
        wait_until(lambda: stage.said.count("was lost and is replaced") == 6)
        wait_until(lambda: len(processes("rollout")) == 7)
        open_gate(tmp_path)
        facts = stage.finish(training)
        counts = check_nothing_lost(stage.folder)
    assert (counts.trained, counts.outstanding, facts["restarts"]) == (40, 0, 6)
