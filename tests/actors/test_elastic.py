"""Machines come and go while a run goes on."""

from functools import partial

import pytest
from faults import GatedWorker, events, open_gate
from ray.cluster_utils import Cluster
from stage import check_nothing_lost, doubles_found, make_config, open_stage, wait_until

from actors.cluster import start_ray, stop_ray
from configs.cluster import ClusterConfig

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
