"""A learner of several processes is asked as one, and dies as one."""

import os
import sys
from functools import partial
from itertools import count
from pathlib import Path

import psutil
import pytest
import ray
from faults import GatedLearner, events, open_gate
from ray.util.placement_group import remove_placement_group
from stage import check_nothing_lost, local_ray, make_config, open_stage, processes, versions_of, wait_until

from envs.types import Task
from learner.learner import Learner
from ray_jobs.run.resources import place_learner, start_learner
from rollout.types import Completion, Trajectory, Turn
from tests.simulated_parts import SimulatedLearner

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))
from tiny import save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

NUMBERS = count()
TWO = ("learner.num_workers=2", "learner.microbatch_tokens=64", "model.lora_rank=4")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


@pytest.fixture
def place_for():
    """Room for a learner, given back afterwards."""
    places = []

    def place(config):
        places.append(place_learner(config))
        return places[-1]

    yield place
    for one in places:
        remove_placement_group(one)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def build_tiny(model_path, config, ranks=None):
    settings = config.learner.model_copy(update={"dtype": "float32"})
    return Learner(model_path, config.model, settings, seed=0, ranks=ranks)


def start(config, model_path, place):
    return start_learner(config, partial(build_tiny, model_path, config), place, f"learner {next(NUMBERS)}")


def demonstrations(number):
    """Of unequal lengths, two microbatches and more."""
    return [demonstration(f"d{index}", list(range(4, 24 + 10 * index))) for index in range(number)]


def demonstration(name, tokens):
    completion = Completion(
        token_ids=tuple(tokens), logprobs=(-1.0,) * len(tokens), text="", finish_reason="stop", policy_version=0
    )
    turn = Turn(role="planner", prompt_token_ids=(len(name), len(tokens)), completion=completion, trainable=True)
    task = Task(id=name, dataset="d", question="", answer="")
    return Trajectory(id=name, group_id="", task=task, turns=(turn,), answer=None, stop_reason="answered")


def rank_pids():
    """The processes of the ranks; the group that owns them is a process of its own."""
    return [one.pid for one in processes("learner") if "LearnerRankActor" in " ".join(one.cmdline())]


def test_group_of_two_learns_what_one_learner_does_and_dies_when_one_of_it_dies(tmp_path, model_path, place_for):
    config = make_config(tmp_path, *TWO)
    single, place = make_config(tmp_path, *TWO[1:]), place_for(config)
    alone, group = start(single, model_path, place_for(single)), start(config, model_path, place)
    for step in range(2):
        expected, found = ray.get([one.imitate_step.remote(demonstrations(3), 1e-2) for one in (alone, group)])
        assert found.metrics["cold_start/loss"] == pytest.approx(expected.metrics["cold_start/loss"], abs=1e-5)
        assert found.metrics["cold_start/packed_tokens"] == expected.metrics["cold_start/packed_tokens"], step
    ray.kill(alone)
    ray.get(group.renumber.remote(7))
    folder = ray.get(group.save_checkpoint.remote(tmp_path / "checkpoints"))
    assert folder.name == "v000007"
    assert [path.name for path in folder.parent.iterdir()] == ["v000007"]
    _, second = rank_pids()
    psutil.Process(second).kill()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(group.imitate_step.remote(demonstrations(3), 1e-2))
    wait_until(lambda: not processes("learner"))
    another = start(config, model_path, place)
    ray.get(another.load_checkpoint.remote(folder))
    assert ray.get(another.imitate_step.remote(demonstrations(3), 1e-2)).metrics["cold_start/grad_norm"] > 0
    ray.kill(another)
    wait_until(lambda: not processes("learner"))


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


def test_run_goes_on_with_another_group_when_a_rank_is_killed_that_the_others_wait_for(tmp_path):
    config = make_config(tmp_path, "learner.num_workers=2", "num_steps=5")
    with open_stage(config, build_learner=partial(MeetingLearner, folder=tmp_path, step=4)) as stage:
        training = stage.reinforce()
        wait_until(lambda: events(tmp_path, "gated"))
        waiting = [pid for pid in rank_pids() if pid != events(tmp_path, "gated")[0]["pid"]]
        os.kill(waiting[0], 9)
        facts = stage.finish(training)
        open_gate(tmp_path)
        check_nothing_lost(stage.folder)
        assert versions_of(stage.folder) == sorted(set(versions_of(stage.folder)))
    assert facts["restarts"] == 1
    assert "the learner was lost and is replaced" in stage.said
