import io

import pytest
from rich.console import Console as RichConsole

from ray_jobs.run import console as module
from ray_jobs.run.console import Console


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def console(stream):
    return Console(RichConsole(file=stream, width=60))


def test_control_characters_are_removed(console, stream):
    console.note("failed: a\x1b]0;title\x07b\x1b[2Jc")
    assert stream.getvalue() == "failed: a]0;titlebc\n"


def test_wait_that_has_just_begun_is_not_called_silent(console, stream, monkeypatch):
    now = module.time.monotonic() + 100
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with console.waiting("the batch"):
        console._break_silence()
        assert stream.getvalue() == "waiting for the batch\n"
        now += 90
        console._break_silence()
        assert "1 min 30 s" in stream.getvalue().splitlines()[1]
