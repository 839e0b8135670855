"""Ray gives its own processes 30 s to start, which a busy machine may need longer for."""

import signal
from contextlib import nullcontext

import pytest
import ray

from actors.cluster import CutOffError, start_ray
from configs.run import ClusterConfig

BUSY = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


@pytest.mark.parametrize(("failing", "expected"), [(2, nullcontext()), (9, pytest.raises(CutOffError))])
def test_ray_that_is_too_slow_to_start_is_started_three_times(monkeypatch, failing, expected):
    starts = []

    def init(**_):
        starts.append(1)
        if len(starts) <= failing:
            raise Exception(BUSY)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with expected:
        start_ray(ClusterConfig())
    assert len(starts) == 3


@pytest.mark.parametrize("found", [signal.SIG_DFL, lambda *_: None])
def test_handler_of_sigterm_stays_where_there_is_one(found, monkeypatch):
    def of_ray(*_):
        raise AssertionError

    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, of_ray))
    before = signal.signal(signal.SIGTERM, found)
    try:
        start_ray(ClusterConfig())
        assert signal.getsignal(signal.SIGTERM) is (of_ray if found == signal.SIG_DFL else found)
    finally:
        signal.signal(signal.SIGTERM, before)
