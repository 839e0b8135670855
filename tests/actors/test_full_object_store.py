"""Ray's object store is full, and the disk behind it, too: the run ends with that, and goes on once there is space."""

from functools import partial

import pytest
import ray
from ray._private import ray_constants
from stage import check_law, local_ray, make_config, open_stage, steps_of, wait_until

from tests.simulated_parts import SimulatedLearner

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

STORE_BYTES = 100 * 2**20
ADAPTER_BYTES = 10 * 2**20
NUM_STEPS = 6


@pytest.fixture
def small_store(monkeypatch):
    """A cluster with an object store of STORE_BYTES that may move next to nothing to the disk."""
    monkeypatch.setattr(ray_constants, "DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", STORE_BYTES)
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.0001")
    with local_ray():
        assert ray.cluster_resources()["object_store_memory"] <= STORE_BYTES
        yield


def fill() -> list[ray.ObjectRef]:
    """What the store holds until nobody holds these any more."""
    held = []
    for size in (16 * 2**20, 2**20):
        try:
            while True:
                held.append(ray.put(b"x" * size))
        except ray.exceptions.OutOfDiskError:
            pass
    return held


def test_full_object_store_ends_the_run_and_space_lets_it_go_on(tmp_path, small_store):
    config = make_config(tmp_path, f"num_steps={NUM_STEPS}")
    build = partial(SimulatedLearner, padding=ADAPTER_BYTES)
    with open_stage(config, build_learner=build) as stage:
        training = stage.reinforce()
        wait_until(lambda: len(steps_of(stage.folder)) >= 2)
        held = fill()
        with pytest.raises(ray.exceptions.OutOfDiskError):
            stage.finish(training)
        assert len(steps_of(stage.folder)) < NUM_STEPS
    held.clear()
    with open_stage(config, build_learner=build) as stage:
        check_law(stage.folder, stage.finish(stage.reinforce()))
        assert len(steps_of(stage.folder)) == NUM_STEPS
