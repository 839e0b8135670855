import io

from rich.console import Console as RichConsole

from ray_jobs.run.console import Console


def test_phase_that_continues_after_an_earlier_step_counts_from_there():
    stream = io.StringIO()
    with Console(RichConsole(file=stream, width=60)).phase("reinforce", 12) as phase:
        for step in (10, 5):
            phase.continue_after(step)
        for _ in range(7):
            phase.advance()
    assert "12/12" in stream.getvalue()


def test_control_characters_are_removed():
    stream = io.StringIO()
    Console(RichConsole(file=stream, width=60)).note("failed: a\x1b]0;title\x07b\x1b[2Jc")
    assert stream.getvalue() == "failed: a]0;titlebc\n"
