"""Actors that cannot even be made: what an error says then."""

import importlib

import pytest
import ray
from stage import make_config

from actors.learner import LearnerGroupActor, LearnerRankActor
from actors.rollout_worker import RolloutWorkerActor

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class Elsewhere:
    """Read by another process, this is a module that is not installed there."""

    def __reduce__(self):
        return importlib.import_module, ("installed_elsewhere",)


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
