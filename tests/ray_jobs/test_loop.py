"""The loop's own decisions, with scripted parts around it."""

from types import SimpleNamespace

import pytest

from configs.run import RunConfig
from ray_jobs import train


@pytest.mark.parametrize(("num_steps", "kept"), [(0, 0), (3, 1), (5, 0), (7, 1)])
def test_checkpoint_is_saved_when_the_tasks_end(monkeypatch, num_steps, kept):
    """Regression: with `max_tasks` a run ended with weights that were in no checkpoint: evaluated, and nowhere to be
    loaded from."""
    calls = []
    monkeypatch.setattr(train, "save_checkpoint", lambda *_: calls.append("kept"))
    sampling = SimpleNamespace(next_batch=SimpleNamespace(remote=lambda step: None))
    run = SimpleNamespace(
        config=RunConfig.model_validate({"learner": {"checkpoint_every": 5}}),
        sampling=sampling,
        supervisor=SimpleNamespace(wait=lambda answer, what: answer),
    )
    assert not train.train_step(run, SimpleNamespace(num_steps=num_steps))
    assert len(calls) == kept
