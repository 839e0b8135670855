import threading

import pytest

from ray_jobs.run.folder import Backlog

PATIENCE_S = 60.0


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def fail(message):
    raise OSError(message)


def test_who_adds_work_does_not_wait_for_it(gate):
    done = []
    backlog = Backlog(2)
    backlog.add(lambda: gate.wait(PATIENCE_S) and done.append("first"))
    backlog.add(lambda: done.append("second"))
    assert done == []
    gate.set()
    backlog.finish()
    assert done == ["first", "second"]


def test_who_adds_more_than_may_be_open_waits(gate):
    done = []
    backlog = Backlog(1)
    backlog.add(lambda: gate.wait(PATIENCE_S) and done.append("first"))
    threading.Timer(0.1, gate.set).start()
    backlog.add(lambda: done.append("second"))
    assert done[0] == "first"
    backlog.close()


def test_failure_is_told_once_to_who_adds_the_next_work():
    backlog = Backlog(1)
    backlog.add(lambda: fail("disk full"))
    with pytest.raises(OSError, match="disk full"):
        backlog.add(lambda: None)
    backlog.add(lambda: None)
    backlog.finish()


@pytest.mark.parametrize("wait", [Backlog.finish, Backlog.close])
def test_failure_is_told_at_the_end_when_all_is_done(wait, gate):
    done = []
    backlog = Backlog(3)
    backlog.add(lambda: gate.wait(PATIENCE_S) and fail("disk full"))
    backlog.add(lambda: done.append("second"))
    gate.set()
    with pytest.raises(OSError, match="disk full"):
        wait(backlog)
    assert done == ["second"]
