"""How the RL loop begins."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from ray_jobs import train


class WorkBegan(Exception):
    pass


def test_workers_sample_with_the_weights_that_rl_goes_on_from_before_they_are_given_work(monkeypatch):
    told = []

    def continued(run):
        told.append("published")
        return SimpleNamespace(num_steps=3)

    def supervisor(run):
        raise WorkBegan

    monkeypatch.setattr(train, "continue_training", continued)
    monkeypatch.setattr(train, "Supervisor", supervisor)
    monkeypatch.setattr(train.ray, "get", lambda answer: answer)
    run = SimpleNamespace(
        config=SimpleNamespace(num_steps=5),
        actors=SimpleNamespace(
            sync_weights=lambda: told.append("taken up"),
            store=SimpleNamespace(begin_again=SimpleNamespace(remote=lambda: None)),
        ),
        finished=lambda phase: None,
        phase=lambda name, total: nullcontext(SimpleNamespace(skip=lambda steps: None)),
        folder=SimpleNamespace(begin_phase=lambda name: 0.0),
    )
    with pytest.raises(WorkBegan):
        train.reinforce(run)
    assert told == ["published", "taken up"]
