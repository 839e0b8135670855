"""A learner of several ranks works, and is lost, as one."""

import os
from contextlib import contextmanager
from functools import partial

import pytest
import ray
from doubles import GatedLearner, events
from stage import check_law, local_ray, make_config, open_stage, processes, wait_until
from tiny import save_tiny_model

from actors.launch import Builders, Launcher
from actors.learner import call_all
from learner.learner import Learner
from tests.reward.test_step_text import completion, make_trajectory, sampled
from tests.simulated_parts import SimulatedLearner, SimulatedWorker

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

TWO = ("learner.num_workers=2", "learner.microbatch_tokens=64", "model.lora_rank=4")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def build_tiny(model_path, config, ranks=None):
    settings = config.learner.model_copy(update={"dtype": "float32"})
    return Learner(model_path, config.model, settings, seed=0, ranks=ranks)


@contextmanager
def learner_of(folder, model_path, *overrides):
    """Start a learner, and end it afterwards."""
    config = make_config(folder, *overrides)
    builders = Builders(learner=partial(build_tiny, model_path, config), worker=SimulatedWorker)
    launcher = Launcher(config, folder, builders, sees_folder=lambda: True)
    ranks = launcher.start_learner()
    launcher.wait_for_learner()
    try:
        yield ranks
    finally:
        for rank in ranks:
            ray.kill(rank)
        launcher.free_all()
        wait_until(lambda: not processes("learner"))


def call(ranks, method, *args):
    return ray.get(call_all(ranks, method, *args))[0]


def demonstrations(number):
    """Of unequal lengths, two microbatches and more."""
    replies = [completion(token_ids=tuple(range(4, 24 + 10 * index))) for index in range(number)]
    return [make_trajectory(sampled((2, 20 + index), one), id=f"d{index}") for index, one in enumerate(replies)]


def test_two_ranks_write_one_checkpoint_and_continue_from_it(tmp_path, model_path):
    saved = None
    for number in (7, 8):
        with learner_of(tmp_path, model_path, *TWO) as ranks:
            if saved:
                call(ranks, "load_checkpoint", saved)
            assert call(ranks, "imitate_step", demonstrations(3), 1e-2).metrics["cold_start/grad_norm"] > 0
            call(ranks, "renumber", number)
            saved = call(ranks, "save_checkpoint", tmp_path / "checkpoints")
    assert {path.name for path in saved.parent.iterdir()} == {"v000007", "v000008"}


class MeetingLearner(GatedLearner):
    """Waits in every train step for the other rank."""

    def __init__(self, ranks, **options):
        super().__init__(**options)
        self.writes = ranks.rank == 0

    def train_step(self, batch):
        import torch.distributed

        if self.writes:
            result = super().train_step(batch)
            torch.distributed.barrier()
            return result
        torch.distributed.barrier()
        return SimulatedLearner.train_step(self, batch)


def test_run_continues_with_other_ranks_when_one_is_killed_that_the_others_wait_for(tmp_path):
    config = make_config(tmp_path, "learner.num_workers=2", "num_steps=5")
    with open_stage(config, build_learner=partial(MeetingLearner, folder=tmp_path, step=4)) as stage:
        training = stage.reinforce()
        wait_until(lambda: events(tmp_path, "gated"))
        waiting = [one.pid for one in processes("learner") if one.pid != events(tmp_path, "gated")[0]["pid"]]
        os.kill(waiting[0], 9)
        facts = stage.finish(training)
        check_law(stage.folder, facts)
    assert facts["restarts"] == 1
