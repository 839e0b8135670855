"""Every actor redacts what its process prints, whether or not it runs custom code."""

import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest

from actors import dynamic_sampling, learner, prm, rollout_worker
from configs.reward import PrmConfig
from configs.run import RunConfig


class StartedError(Exception):
    """Ends a constructor where it would load a model."""


def model(*_, **__):
    raise StartedError


ACTORS = [
    (dynamic_sampling.DynamicSampling, RunConfig()),
    (learner.BaseWeightsActor, model),
    (learner.LearnerActor, RunConfig(), 0, 1),
    (prm.PrmActor, PrmConfig(), Path("base"), 0, Path("trained")),
    (rollout_worker.RolloutWorkerActor, RunConfig(), 0, None, None, model),
]


@pytest.mark.parametrize("actor", ACTORS, ids=lambda actor: actor[0].__ray_metadata__.class_name)
def test_printed_keys_are_redacted(actor, monkeypatch):
    monkeypatch.setattr(prm, "ProcessRewardModel", model)
    monkeypatch.setenv("SECRET_API_KEY", "planted-value-of-a-key")
    monkeypatch.setattr(sys, "stdout", StringIO())
    remote, *arguments = actor
    with suppress(StartedError):
        remote.__ray_metadata__.modified_class(*arguments)
    print("planted-value-of-a-key")
    assert sys.stdout.getvalue() == "[SECRET_API_KEY]\n"
