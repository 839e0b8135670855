"""Start of a run's parts on clusters that have no room, or nodes that do not see the run folder."""

import time
from unittest.mock import Mock

import pytest
import ray
from stage import end_actors, local_ray, make_config, open_stage

from actors import launch
from actors.cluster import CutOffError
from actors.launch import Builders, Launcher
from configs.errors import UserError
from ray_jobs.run import run as run_module
from tests.simulated_parts import SimulatedLearner, SimulatedWorker

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


class Rank(SimulatedLearner):
    """The second rank sees no run folder, as on another node."""

    def __init__(self, ranks):
        super().__init__()
        self.writes = ranks.rank == 0
        if not self.writes:
            run_module.fingerprint_of = lambda folder: ""


def test_rank_that_does_not_see_the_run_folder_ends_the_start(tmp_path):
    config = make_config(tmp_path, "learner.num_workers=2")
    with pytest.raises(UserError, match="run folder"), open_stage(config, build_learner=Rank):
        pass


@pytest.fixture
def launcher_for(tmp_path):
    launchers = []

    def build(*overrides):
        builders = Builders(learner=SimulatedLearner, worker=SimulatedWorker, prm_base=tmp_path)
        launchers.append(Launcher(make_config(tmp_path, *overrides), tmp_path, builders, sees_folder=lambda: True))
        return launchers[-1]

    yield build
    for one in launchers:
        one.free_all()
    end_actors()


def test_prm_without_a_card_is_where_the_driver_is(launcher_for, monkeypatch):
    """Regression: Ray puts an actor that claims nothing on any node, also where the run folder is not."""
    prm = Mock()
    monkeypatch.setattr(launch, "PrmActor", prm)
    launcher_for("prm.device=cpu").start_prm()
    strategy = prm.options.call_args.kwargs["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (ray.get_runtime_context().get_node_id(), True)


def test_prm_without_room_ends_the_start(launcher_for):
    with pytest.raises(CutOffError, match=r"PRM.*cluster.patience_s"):
        launcher_for("prm.device=cuda", "cluster.patience_s=1").launch()


def test_part_that_does_not_answer_ends_the_start(launcher_for):
    """Regression: the message did not say how to resume, so that a run which hung in its start seemed lost."""
    hung = Mock()
    hung.heartbeat.remote.return_value = never.remote()
    with pytest.raises(CutOffError, match=r"cluster.answer_s.*worker 0"):
        launcher_for("cluster.answer_s=0.1")._wait({"worker 0": hung})


@ray.remote(num_cpus=0)
def never():
    time.sleep(60.0)
