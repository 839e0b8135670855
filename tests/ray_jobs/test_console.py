import io
import time

import pytest
from rich.console import Console as RichConsole

from ray_jobs.run import console as console_module
from ray_jobs.run.console import Console


def make_console(**options):
    stream = io.StringIO()
    return RichConsole(file=stream, width=60, **options), stream


def test_a_reason_that_quotes_a_web_page_cannot_command_the_terminal():
    output, stream = make_console()
    Console(output).note("failed: a\x1b]0;title\x07b\x1b[2Jc")
    assert stream.getvalue() == "failed: a]0;titlebc\n"


@pytest.fixture
def minutes(monkeypatch):
    """A clock that goes on when told, and lines that are due are printed at once."""
    clock = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(console_module, "LISTEN_EVERY_S", 0.001)
    return clock


def lines_after(stream, num):
    deadline = time.perf_counter() + 60
    while len(lines := stream.getvalue().splitlines()) < num:
        assert time.perf_counter() < deadline, lines
        time.sleep(0.001)
    return lines


def test_no_minute_passes_without_a_line_that_says_what_is_waited_for(minutes):
    output, stream = make_console()
    console = Console(output)
    console.late = lambda: "; the store has not answered for 30 s"
    with console.phase("reinforce"), console.waiting("the groups of step 7"):
        minutes[0] += 45
        lines_after(stream, 2)
        minutes[0] += 45
        lines = lines_after(stream, 3)
    assert lines[1:3] == [
        f"nothing happened for {seconds} s, waiting for the groups of step 7; the store has not answered for 30 s"
        for seconds in (45, 90)
    ]
