"""The loop's own decisions, with scripted parts around it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import ray

from actors.cluster import CutOffError, LearnerLostError
from configs.errors import UserError
from configs.run import RunConfig
from ray_jobs import train
from ray_jobs.run import run as module
from ray_jobs.run.progress import Training
from rollout.filters import NoSignalError


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


@pytest.mark.parametrize("num_steps", [0, 3])
def test_without_signal_a_run_ends_with_an_error_only_before_the_first_step(monkeypatch, num_steps):
    saved, told = [], []

    def no_signal(*_):
        raise ray.exceptions.RayTaskError("next_batch", "", NoSignalError("all were right")).as_instanceof_cause()

    monkeypatch.setattr(train, "save_checkpoint", lambda *_: saved.append(True))
    run = SimpleNamespace(
        config=RunConfig.model_validate({"learner": {"checkpoint_every": 5}}),
        sampling=SimpleNamespace(next_batch=SimpleNamespace(remote=lambda step: None)),
        supervisor=SimpleNamespace(wait=no_signal),
        tell=told.append,
    )
    training = Training([], num_steps=num_steps)
    if num_steps == 0:
        with pytest.raises(NoSignalError):
            train.train_step(run, training)
    else:
        assert not train.train_step(run, training)
        assert training.ended_early == "all were right"
        assert told[0].endswith("all were right")
    assert len(saved) == (num_steps > 0)


LOST = [
    CutOffError("no room"),
    LearnerLostError("it died"),
    ray.exceptions.RayActorError(),
    OSError(28, "full", "/tmp/r"),
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_error_after_which_a_run_can_be_resumed_says_how(tmp_path, monkeypatch, error):
    @contextmanager
    def failing(*_):
        raise error
        yield

    for name in ("model_notes", "notes_before_start", "start_ray", "builders_of"):
        monkeypatch.setattr(module, name, lambda *_, **__: ())
    monkeypatch.setattr(module.RunFolder, "keep_tokenizer", lambda *_: None)
    monkeypatch.setattr(module, "start_parts", failing)
    config = RunConfig.model_validate({"output_dir": str(tmp_path), "name": "r"})
    resumed = pytest.raises(UserError, match=f"agentflow resume .*{tmp_path.name}/r")
    with resumed, module.open_run(config, SimpleNamespace(sandbox=None, model_path=None), with_prm=False):
        pass
