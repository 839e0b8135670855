"""Actors that cannot even be made: what an error says then."""

import importlib

import pytest
import ray
from stage import local_ray, make_config

from actors.learner_group import LearnerGroupActor, LearnerRankActor
from actors.rollout_worker import RolloutWorkerActor

pytestmark = pytest.mark.ray


class Elsewhere:
    """Read by another process, this is a module that is not installed there."""

    def __reduce__(self):
        return importlib.import_module, ("installed_elsewhere",)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


@pytest.mark.parametrize(
    ("actor", "arguments"),
    [
        (RolloutWorkerActor, (0, None, None, Elsewhere())),
        (LearnerRankActor, (Elsewhere(),)),
        (LearnerGroupActor, (Elsewhere(), None, {}, {})),
    ],
)
def test_an_actor_whose_arguments_cannot_be_read_names_the_missing_module_and_nothing_else(tmp_path, actor, arguments):
    with pytest.raises(ray.exceptions.RayActorError) as caught:
        ray.get(actor.remote(make_config(tmp_path), *arguments).__ray_ready__.remote(), timeout=120)
    assert "No module named 'installed_elsewhere'" in str(caught.value)
    assert "AttributeError" not in str(caught.value)
