"""Parts for which the cluster has no machine that would do: without room, or without the run folder."""

from functools import partial

import pytest
import ray
from faults import first_time
from stage import dismiss, kill, local_ray, make_config, open_stage, steps_of, wait_until

from ray_jobs.run import actors as run_actors
from ray_jobs.run.actors import NoRoomError, RunActors
from ray_jobs.run.folder import RunFolder
from rollout.engines.engine import Pulse
from tests.simulated_parts import SimulatedLearner, SimulatedWorker

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

UNSEEN = "the learner runs on a machine that does not see the run folder"


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


def hide_run_folder():
    """From this process, as on another machine."""
    run_actors.fingerprint_of = lambda folder: ""


class Rank(SimulatedLearner):
    """One of them is where the run folder is not."""

    def __init__(self, ranks, *, elsewhere):
        super().__init__()
        self.writes = ranks.rank == 0
        if ranks.rank == elsewhere:
            hide_run_folder()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_does_not_see_the_run_folder_ends_the_start(tmp_path, rank):
    """Regression: the group that asks the ranks was asked, which is where the driver is. The first rank would have
    written checkpoints that nobody finds."""
    config = make_config(tmp_path, "learner.num_workers=2")
    build = partial(Rank, elsewhere=rank)
    with pytest.raises(NoRoomError, match=UNSEEN), open_stage(config, build_learner=build):
        pass


class Wanderer(SimulatedLearner):
    """Started again, it is where the run folder is not."""

    def __init__(self, folder):
        super().__init__(step_s=0.1)
        if not first_time(folder, "learner"):
            hide_run_folder()


def test_learner_that_is_started_again_without_the_run_folder_ends_the_run(tmp_path):
    """Regression: it went on, with checkpoints on a machine where no resumption looks for them."""
    config = make_config(tmp_path, "num_steps=100", "learner.checkpoint_every=50")
    with open_stage(config, build_learner=partial(Wanderer, tmp_path)) as stage:
        training = stage.reinforce()
        wait_until(lambda: steps_of(stage.folder))
        kill("learner")
        with pytest.raises(NoRoomError, match=UNSEEN):
            stage.finish(training)


class Recorded:
    """In the place of the PRM's actor: with which options it was made."""

    def __init__(self):
        self.given = {}

    def options(self, **given):
        self.given = given
        return self

    def remote(self, *_):
        return Silent.remote()


@ray.remote(num_cpus=0)
class Silent:
    async def heartbeat(self):
        return Pulse()


def test_prm_without_a_card_is_where_the_driver_is(tmp_path, monkeypatch):
    """Regression: Ray puts an actor that claims nothing on any machine, also where the run folder is not."""
    prm = Recorded()
    monkeypatch.setattr(run_actors, "PrmActor", prm)
    config = make_config(tmp_path, "prm.device=cpu")
    with RunFolder.open(config, with_prm=True) as folder:
        parts = RunActors(config, folder, build_learner=SimulatedLearner, build_worker=SimulatedWorker)
        try:
            parts.start_prm(tmp_path)
        finally:
            ray.kill(parts.prm)
            dismiss(parts)
    strategy = prm.given["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (ray.get_runtime_context().get_node_id(), True)


def test_prm_without_room_ends_the_start_within_its_patience(tmp_path):
    """Regression: it was waited for without an end."""
    config = make_config(tmp_path, "prm.device=cuda", "cluster.patience_s=1")
    with RunFolder.open(config, with_prm=True) as folder:
        parts = RunActors(config, folder, build_learner=SimulatedLearner, build_worker=SimulatedWorker)
        try:
            parts.start_prm(tmp_path)
            with pytest.raises(NoRoomError, match=r"no room for the PRM: it claims {'GPU': 0.1} .*cluster.patience_s"):
                parts.wait_until_ready()
        finally:
            ray.kill(parts.prm)
            dismiss(parts)
