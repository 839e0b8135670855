"""What a person sees while a run goes on, and at its end."""

import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from configs.errors import printable
from ray_jobs.run.summary import POLICIES, HeldOut, held_out_rates
from ray_jobs.viewer.pages import percent, points
from rollout.filters import SOLVED
from rollout.records import read_heads


def next_commands(run: Path) -> list[tuple[str, str]]:
    """Each with what it does; one is left out where the folder lacks what it needs."""
    folder = shlex.quote(str(run))
    commands = [(f"agentflow view {folder}", "why each step got its advantage")]
    question = _solved_question(run / "trajectories.jsonl")
    if question:
        policy = ["--recipe", str(run / "config.json"), "--adapter", str(run)]
        # Behind the options, after --, a question may begin with a dash.
        words = [*policy, "--", question] if question.startswith("-") else [question, *policy]
        commands.append((shlex.join(["agentflow", "solve", *words]), "ask the trained planner"))
    return commands


def _solved_question(trajectories: Path) -> str | None:
    """The first held-out question that the trained planner solved."""
    if not trajectories.exists():
        return None
    heads = read_heads(trajectories)
    return next((one["question"] for _, one in heads if one["phase"] == "eval_after" and one["reward"] == SOLVED), None)


_TITLES = {
    "start": "start engine and learner",
    "eval_untouched": "evaluate the untouched model",
    "cold_start": "cold start on demonstrations",
    "eval_before": "evaluate before RL",
    "collect": "collect trajectories to label",
    "label": "label their steps",
    "train_prm": "train the process reward model",
    "reinforce": "reinforce",
    "eval_after": "evaluate after RL",
}
PLAIN_INTERVAL_S = 5.0
SILENCE_S = 45.0
"""After so long without a line the console says what is waited for."""
LISTEN_EVERY_S = 1.0


class PhaseProgress:
    """A phase that goes on: a bar on a terminal, elsewhere a line every few seconds at most. One with nothing to do,
    whose total is 0, says nothing. `facts`: what it brought. `seconds_before`: what it took already, in processes that
    were cut off."""

    def __init__(self, output: "Console", console: RichConsole, title: str, total: int | None) -> None:
        self.facts: dict[str, object] = {}
        self.seconds_before = 0.0
        self._output = output
        self._title = title
        self._total = total
        self._done = self._done_before = 0
        self._began = time.monotonic()
        self._printed_at = float("-inf")
        self._live = console.is_terminal and not console.is_dumb_terminal and total != 0
        self._plain = not self._live and total != 0
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[shown]}"),
            console=console,
            # Engine and learner need the cores; the usual ten redraws a second are felt on two of them.
            refresh_per_second=2,
            disable=not self._live,
        )
        self._task = self._bar.add_task(title, total=total, shown="")

    def skip(self, num: int) -> None:
        """So many were done before this process began, and say nothing of how fast it is."""
        self._done += num
        self._done_before += num
        self._bar.update(self._task, advance=num)

    def expect(self, total: int) -> None:
        """How much there is to do, where that shows only on the way."""
        self._total = total
        self._bar.update(self._task, total=total)

    def advance(self, num: int = 1, /, **fields: float | str) -> None:
        self._done += num
        now = time.monotonic()
        words = {name: value if isinstance(value, str) else f"{value:.3g}" for name, value in fields.items()}
        said = [f"{name.replace('_', ' ')} {word}" for name, word in words.items()]
        shown = "  ".join([*said, *self._time_left(now)])
        self._bar.update(self._task, advance=num, shown=shown)
        self._output.happened(seen=self._live)
        if self._plain and (now - self._printed_at >= PLAIN_INTERVAL_S or self._done == self._total):
            self._printed_at = now
            count = f"{self._done}/{self._total}" if self._total is not None else str(self._done)
            self._output.note(f"  {self._title} {count}  {shown}".rstrip())

    def start(self) -> None:
        if self._plain:
            self._output.note(f"{self._title} ...")
        self._bar.start()

    def stop(self, *, outcome: str, seconds: float) -> None:
        if outcome == "done" and self._total is not None:
            self._bar.update(self._task, completed=self._total)
        self._bar.stop()
        if self._plain or (outcome != "done" and not self._live):
            self._output.note(f"{self._title}: {outcome} after {duration(seconds)}")

    def _time_left(self, now: float) -> Iterator[str]:
        """As long as it took so far for each, once for each that is left. Nothing before a twentieth is done: of many
        that go on side by side, the first says nothing of how fast they are together."""
        counted = self._done - self._done_before
        if self._total is not None and counted * 20 >= self._total > self._done and counted:
            yield f"about {duration((now - self._began) / counted * (self._total - self._done))} left"


class Console:
    """Phases with their wall time. While one goes on, or something is waited for, no minute passes without a line."""

    def __init__(self, output: RichConsole | None = None) -> None:
        self._console = output or RichConsole()
        self._waiting: list[str] = []
        self._said_at = time.monotonic()
        self._happened_at = self._said_at
        self.phase_seconds: dict[str, float] = {}
        self.late: Callable[[], str] = str
        """Adds to the line of a silent minute who does not answer."""

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[PhaseProgress]:
        title = _TITLES.get(name, name)
        progress = PhaseProgress(self, self._console, title, total)
        started = time.perf_counter()
        outcome = "stopped"
        progress.start()
        try:
            with self.waiting(f"the phase '{title}'"):
                yield progress
            outcome = "done"
        finally:
            self.phase_seconds[name] = time.perf_counter() - started
            progress.stop(outcome=outcome, seconds=self.phase_seconds[name])

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Says what is waited for, once nothing has happened for long."""
        self._waiting.append(what)
        self.happened()
        listener = _Listener(self._break_silence) if len(self._waiting) == 1 else None
        try:
            yield
        finally:
            self._waiting.remove(what)
            self.happened()
            if listener:
                listener.stop()

    def happened(self, *, seen: bool = False) -> None:
        """The run got on, whether or not a person sees it."""
        self._happened_at = time.monotonic()
        if seen:
            self._said_at = self._happened_at

    def note(self, text: str) -> None:
        self.happened(seen=True)
        _print_plain(self._console, text)

    def _break_silence(self) -> None:
        now, waiting = time.monotonic(), self._waiting[-1:]
        if waiting and now - self._said_at >= SILENCE_S:
            self._said_at = now
            seconds = round(now - self._happened_at)
            _print_plain(self._console, f"nothing happened for {seconds} s, waiting for {waiting[0]}{self.late()}")


class _Listener:
    """Calls something now and then, from a thread of its own, whatever the others are held up by."""

    def __init__(self, listen: Callable[[], None]) -> None:
        self._listen = listen
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LISTEN_EVERY_S):
            self._listen()


def print_summary(summary: Mapping[str, Any], report: Path, output: RichConsole | None = None) -> None:
    """The numbers to remember, the honest verdict, and where to read on."""
    console = output or RichConsole()
    table = Table(title="Held-out tasks solved", title_justify="left")
    for column in ("policy", "solved", "95% interval", "tasks"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    measured = {f"eval_{one.policy}": one for one in held_out_rates(summary)}
    for phase, policy in POLICIES.items():
        table.add_row(policy, *_rate_cells(measured.get(phase), _planned(summary, phase)))
    console.print(table)
    if means := summary.get("mean_scores"):
        said = ", ".join(f"{value:.3f} {name} RL" for name, value in means.items())
        _print_plain(console, f"mean score: {said}; solved is a score of 1")
    _print_plain(console, f"after RL against before: {summary.get('verdict', 'not measured')}")
    _print_plain(console, _work_line(summary))
    if limit := summary.get("bottleneck"):
        _print_plain(console, f"speed: {limit}")
    _print_plain(console, f"report: {report}")
    for command, does in next_commands(report.parent):
        _print_plain(console, f"{does}: {command}")


def sentence(done: str, facts: Mapping[str, object]) -> str:
    """The facts of a phase in one line."""
    said = (f"{name.removeprefix('num_').replace('_', ' ')} {value}" for name, value in facts.items() if value != [])
    return f"{done}: {', '.join(said)}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _rate_cells(measured: HeldOut | None, planned: int) -> tuple[str, str, str]:
    if measured is None:
        return "not measured", "", f"0 of {planned}" if planned else "0"
    return percent(measured.rate), f"{points((measured.low, measured.high))}%", str(measured.num_tasks)


def _planned(summary: Mapping[str, Any], phase: str) -> int:
    """Tasks that a policy was asked, also those that could not be scored; how many the untouched model was is not
    written down."""
    if phase == "eval_untouched":
        return int(summary.get("num_untouched_tasks", 0))
    return int(summary.get("num_eval_tasks", 0)) + len(summary.get("left_out_eval_tasks", ()))


def _work_line(summary: Mapping[str, Any]) -> str:
    groups, staleness = summary.get("groups", {}), summary.get("staleness", {})
    kinds = ("trained", *(("refused",) if groups.get("refused") else ()), "filtered", "failed")
    counts = ", ".join(f"{groups[kind]} {kind}" for kind in kinds if kind in groups)
    parts = [f"{summary.get('num_steps', '?')} train steps", f"{summary.get('num_trajectories', '?')} trajectories"]
    if "trajectories_per_s" in summary:
        parts[-1] += f" ({summary['trajectories_per_s']:.2f}/s)"
    if counts:
        parts.append(f"groups {counts}")
    if staleness:
        parts.append(f"staleness {staleness['mean']:.2f} mean, {staleness['max']:.0f} max")
    if "wall_s" in summary:
        parts.append(f"{duration(summary['wall_s'])} in all")
    return "; ".join(parts)


def _print_plain(console: RichConsole, text: str) -> None:
    """As it stands: brackets are no markup, and a long line or path is not broken where no terminal is. A reason may
    quote what a model or a web page wrote."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
