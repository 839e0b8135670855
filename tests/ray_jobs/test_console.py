import io
import shlex
import time

import pytest
from rich.console import Console as RichConsole

from envs.types import Task
from ray_jobs.run import console as console_module
from ray_jobs.run.console import Console
from ray_jobs.run.summary import print_summary
from rollout.codec import trajectory_line
from rollout.types import Reward, Trajectory


def make_console(**options):
    stream = io.StringIO()
    return RichConsole(file=stream, width=60, **options), stream


def make_summary(**changes):
    summary = {
        "solve_rate_untouched": 0.0,
        "num_untouched_tasks": 32,
        "solve_rate_before": 0.1,
        "solve_rate_after": 0.8,
        "num_eval_tasks": 300,
        "verdict": "+70.0 points, significant",
        "groups": {"drawn": 120, "trained": 56, "filtered": 52, "failed": 1},
        "staleness": {"mean": 1.5, "max": 3.0},
        "num_steps": 14,
        "num_trajectories": 880,
        "trajectories_per_s": 1.874,
        "wall_s": 737.4,
    }
    return summary | changes


def test_without_a_terminal_each_phase_is_plain_lines(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock[0])
    output, stream = make_console()
    with Console(output).phase("reinforce", total=2) as progress:
        clock[0] += 12
        progress.advance(solve_rate=0.25, staleness=1)
        clock[0] += 12
        progress.advance(solve_rate=0.5, staleness=2)
    first, *steps, last = stream.getvalue().splitlines()
    assert first == "reinforce ..."
    assert steps == [
        "  reinforce 1/2  solve rate 0.25  staleness 1  about 12 s left",
        "  reinforce 2/2  solve rate 0.5  staleness 2",
    ]
    assert last.startswith("reinforce: done after ")


@pytest.mark.parametrize("options", [{}, {"force_terminal": True, "_environ": {}}])
def test_a_phase_with_nothing_to_do_says_nothing(options):
    output, stream = make_console(**options)
    with Console(output).phase("cold_start", total=0):
        pass
    assert stream.getvalue() == ""


def test_phase_that_fails_is_not_called_done_and_its_time_is_kept():
    output, stream = make_console()
    console = Console(output)
    with pytest.raises(RuntimeError), console.phase("eval_before", total=3):
        raise RuntimeError("engine died")
    assert "stopped after" in stream.getvalue()
    assert "done" not in stream.getvalue()
    assert console.phase_seconds["eval_before"] >= 0


def test_notes_are_printed_as_they_stand():
    output, stream = make_console()
    text = "[bold]not markup[/bold] " + "x" * 100
    Console(output).note(text)
    assert stream.getvalue() == text + "\n"


def test_a_reason_that_quotes_a_web_page_cannot_command_the_terminal():
    output, stream = make_console()
    Console(output).note("failed: a\x1b]0;title\x07b\x1b[2Jc")
    assert stream.getvalue() == "failed: a]0;titlebc\n"


def test_summary_shows_rates_intervals_verdict_and_the_whole_path(tmp_path):
    output, stream = make_console()
    report = tmp_path / ("long" * 20) / "report.html"
    print_summary(make_summary(), report, output)
    shown = stream.getvalue()
    # Wilson's interval of 240 of 300.
    for words in (
        "80.0%",
        "75.1 to 84.1%",
        "after RL against before: +70.0 points, significant",
        "before RL",
        "56 trained, 52 filtered, 1 failed",
    ):
        assert words in shown
    assert f"report: {report}\n" in shown
    assert "12 min 17 s in all" in shown


def attempt(phase, reward, question):
    task = Task(id="t", dataset="d", question=question, answer="1")
    outcome = Reward(outcome=reward, total=reward)
    return Trajectory(
        id="t", group_id="g", task=task, turns=(), answer="1", stop_reason="answered", phase=phase, reward=outcome
    )


def test_summary_ends_with_commands_that_can_be_run_as_they_are(tmp_path):
    run = tmp_path / "my runs" / "demo"
    run.mkdir(parents=True)
    attempts = [
        attempt("eval_before", 1.0, "before?"),
        attempt("eval_after", 0.0, "wrong?"),
        attempt("eval_after", 1.0, "What's 6*7?"),
    ]
    (run / "trajectories.jsonl").write_bytes(b"".join(map(trajectory_line, attempts)))
    output, stream = make_console()
    print_summary(make_summary(), run / "report.html", output)
    view, solve = stream.getvalue().splitlines()[-2:]
    assert shlex.split(view.partition(": ")[2]) == ["agentflow", "view", str(run)]
    policy = ["--recipe", str(run / "config.json"), "--adapter", str(run)]
    assert shlex.split(solve.partition(": ")[2]) == ["agentflow", "solve", "What's 6*7?", *policy]


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


def test_a_phase_is_waited_for_where_nothing_smaller_is_named(minutes):
    output, stream = make_console()
    console = Console(output)
    with console.phase("eval_before"):
        with console.waiting("something"):
            pass
        minutes[0] += 50
        assert lines_after(stream, 2)[1] == "nothing happened for 50 s, waiting for the phase 'evaluate before RL'"


def test_steps_that_go_on_are_no_silence(minutes):
    output, stream = make_console()
    with Console(output).phase("reinforce", total=9) as progress:
        for _ in range(8):
            minutes[0] += 40
            progress.advance()
            time.sleep(0.01)
    assert "nothing happened" not in stream.getvalue()
