"""The loop's own decisions, with scripted parts around it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import ray
from torch import OutOfMemoryError

from actors.cluster import CutOffError, LearnerLostError
from configs.errors import UserError
from configs.run import RunConfig
from ray_jobs import train
from ray_jobs.run import run as module
from ray_jobs.run.progress import Training
from rollout.filters import NoSignalError


@pytest.mark.parametrize("no_signal", [False, True])
@pytest.mark.parametrize(("num_steps", "kept"), [(0, 0), (3, 1), (5, 0), (7, 1)])
def test_checkpoint_is_saved_when_tasks_or_signal_end(monkeypatch, num_steps, kept, no_signal):
    """Regression: with `max_tasks` a run ended with weights that were in no checkpoint: evaluated, and nowhere to be
    loaded from."""
    saved, told, training = [], [], Training([], num_steps=num_steps)

    def wait(answer, what):
        if no_signal:
            raise ray.exceptions.RayTaskError("next_batch", "", NoSignalError("all were right")).as_instanceof_cause()

    monkeypatch.setattr(train, "save_checkpoint", lambda *_: saved.append(True))
    run = SimpleNamespace(
        config=RunConfig.model_validate({"learner": {"checkpoint_every": 5}}),
        sampling=SimpleNamespace(next_batch=SimpleNamespace(remote=lambda step: None)),
        supervisor=SimpleNamespace(wait=wait),
        tell=told.append,
    )
    if no_signal and not num_steps:
        with pytest.raises(NoSignalError):
            train.train_step(run, training)
    else:
        assert not train.train_step(run, training)
        assert training.ended_early == ("all were right" if no_signal else None)
        assert [text.endswith("all were right") for text in told] == [True] * no_signal
    assert len(saved) == kept


LOST = [
    CutOffError("no room"),
    LearnerLostError("it died"),
    ray.exceptions.RayActorError(),
    OSError(28, "full", "/tmp/r"),
    ray.exceptions.RayTaskError("train_step", "", OutOfMemoryError("CUDA out of memory")).as_instanceof_cause(),
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
