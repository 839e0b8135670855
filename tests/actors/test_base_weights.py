"""The base weights' holder: who reads them may die and come back; where the holder dies, the run ends and says why."""

from functools import partial

import pytest
import ray
import torch
from doubles import GatedWorker, events, open_gate
from stage import check_law, kill, make_config, open_stage, wait_until
from tiny import save_tiny_model

from rollout.engines.base_weights import BaseWeights
from tests.simulated_parts import SimulatedLearner

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults, pytest.mark.usefixtures("cluster")]

SHARED = ("card.share_base=true", "rollout.engine.adapter_mode=native", "rollout.num_workers=1")


def checked(base, sums):
    """Raises where what is read is not what the holder read from the files."""
    found = {name: float(weight.double().sum()) for name, weight in ray.get(base.export.remote()).parts().items()}
    assert found == sums


def build_worker(index, base, *, sums, folder):
    checked(base, sums)
    return GatedWorker(index, folder=folder)


def build_learner(base, *, sums):
    checked(base, sums)
    return SimulatedLearner()


@pytest.fixture
def shared(tmp_path):
    """What the parts of a stage are made with."""
    model = save_tiny_model(tmp_path / "model", "llama")
    held = BaseWeights(model, device="cpu", precision="float32")
    sums = {name: float(weight.to(torch.float64).sum()) for name, weight in held.export().parts().items()}
    held.close()
    return {
        "build_base": partial(BaseWeights, model, device="cpu", precision="float32"),
        "build_worker": partial(build_worker, sums=sums, folder=tmp_path),
        "build_learner": partial(build_learner, sums=sums),
    }


def test_a_worker_and_a_learner_that_were_killed_read_the_same_weights_again(tmp_path, shared):
    config = make_config(tmp_path, *SHARED, "max_tasks=12", "num_steps=50")
    with open_stage(config, **shared) as stage:
        training = stage.reinforce()
        wait_until(lambda: events(tmp_path, "begin"))
        kill("rollout")
        kill("learner")
        open_gate(tmp_path)
        facts = stage.finish(training)
        groups = check_law(stage.folder, facts)
    assert groups["trained"] + groups["filtered"] == 12
    assert facts["restarts"] >= 2
