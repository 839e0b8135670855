"""Ray gives its own processes 30 s to start, which a busy machine may need longer for."""

import signal

import pytest
import ray

from actors.cluster import start_ray
from configs.errors import UserError
from configs.run import ClusterConfig

BUSY = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


@pytest.fixture
def starts(monkeypatch):
    """How often Ray is started; `failing` says how many of these time out."""
    seen = {"starts": 0, "failing": 0}

    def init(**_):
        seen["starts"] += 1
        if seen["starts"] <= seen["failing"]:
            raise Exception(BUSY)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return seen


def test_ray_that_was_too_slow_to_start_is_started_again(starts):
    starts["failing"] = 2
    start_ray(ClusterConfig())
    assert starts["starts"] == 3


def test_ray_that_never_starts_is_an_error_of_the_user(starts):
    starts["failing"] = 9
    with pytest.raises(UserError):
        start_ray(ClusterConfig())
    assert starts["starts"] == 3


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
