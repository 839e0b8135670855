import io

import pytest
from rich.console import Console as RichConsole

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
