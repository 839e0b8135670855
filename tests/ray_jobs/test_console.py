import io

from rich.console import Console as RichConsole

from ray_jobs.run.console import Console


def test_control_characters_are_removed():
    stream = io.StringIO()
    Console(RichConsole(file=stream, width=60)).note("failed: a\x1b]0;title\x07b\x1b[2Jc")
    assert stream.getvalue() == "failed: a]0;titlebc\n"
