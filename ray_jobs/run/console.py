"""Console of a run: phases with their progress, and a line at least every minute."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn

from configs.errors import printable

_TITLES = {
    "start": "start engine and learner",
    "eval_untouched": "evaluate the untouched model",
    "cold_start": "cold start on demonstrations",
    "eval_before": "evaluate before RL",
    "collect": "collect trajectories to label",
    "label": "label their steps",
    "deepen": "search for right steps",
    "train_prm": "train the process reward model",
    "reinforce": "reinforce",
    "eval_after": "evaluate after RL",
}
PLAIN_INTERVAL_S = 5.0
SILENCE_S = 45.0
"""Time without a line after which the console says what the run is waiting for."""
LISTEN_EVERY_S = 1.0


class PhaseProgress:
    """Progress of a phase: a bar on a terminal, and elsewhere a line every few seconds.

    A phase whose total is 0 prints nothing.
    """

    def __init__(self, output: "Console", console: RichConsole, title: str, total: int | None) -> None:
        self.facts: dict[str, object] = {}
        """Results of the phase."""
        self.seconds_before = 0.0
        """Seconds that the phase took in earlier processes of the run."""
        self._output, self._title, self.total = output, title, total
        self._done = self._done_before = 0
        self.started = self._continued = time.monotonic()
        self._printed_at = float("-inf")
        self._live = console.is_terminal and not console.is_dumb_terminal and total != 0
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}")
        # Engine and learner need the cores: ten redraws a second, the default, slow down a machine with two.
        self.bar = Progress(*columns, console=console, refresh_per_second=2, disable=not self._live)
        self._task = self.bar.add_task(title, total=total, shown="")
        if not self._live and total != 0:
            output.note(f"{title} ...")

    def continue_after(self, num: int) -> None:
        """Continue after this step. Those before do not enter the estimate of the time left."""
        self._done = self._done_before = num
        self._continued = time.monotonic()
        self.bar.update(self._task, completed=num)

    def expect(self, total: int) -> None:
        """Set the total, if it is known only after the start."""
        self.total = total
        self.bar.update(self._task, total=total)

    def advance(self, **fields: float | str) -> None:
        """Count a step, and show the newest values of the fields."""
        self._done += 1
        now, counted = time.monotonic(), self._done - self._done_before
        parts = [str(self._done) if self.total is None else f"{self._done}/{self.total}"]
        for name, value in fields.items():
            parts.append(f"{name.replace('_', ' ')} {value if isinstance(value, str) else f'{value:.3g}'}")
        # Of many steps that run in parallel, the first twentieth says little about their common speed.
        if self.total is not None and counted * 20 >= self.total > self._done and counted:
            parts.append(f"about {duration((now - self._continued) / counted * (self.total - self._done))} left")
        shown = "  ".join(parts)
        self.bar.update(self._task, advance=1, shown=shown)
        self._output.happened(seen=self._live)
        if not self._live and (now - self._printed_at >= PLAIN_INTERVAL_S or self._done == self.total):
            self._printed_at = now
            self._output.note(f"  {self._title} {shown}")


class Console:
    """Prints phases with their wall time, and what the run is waiting for after most of a minute without a line."""

    def __init__(self, output: RichConsole | None = None) -> None:
        self._console = output or RichConsole()
        self._waiting: list[str] = []
        self._said_at = self._happened_at = time.monotonic()
        self._listener: threading.Thread | None = None
        self.phase_seconds: dict[str, float] = {}
        self.late: Callable[[], str] = str
        """Returns the end of that line: the groups so far, and the parts that have been silent for long."""

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[PhaseProgress]:
        """Show the progress of a phase while the body runs, and how long it took."""
        title = _TITLES.get(name, name)
        progress, outcome = PhaseProgress(self, self._console, title, total), "stopped"
        try:
            with progress.bar, self.waiting(f"the phase '{title}'"):
                yield progress
            outcome = "done"
        finally:
            self.phase_seconds[name] = time.monotonic() - progress.started
            if progress.total != 0:
                self.note(f"{title}: {outcome} after {duration(self.phase_seconds[name])}")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name what the run is waiting for while the body runs."""
        if self._listener is None:
            self._listener = threading.Thread(target=self._listen, name="console", daemon=True)
            self._listener.start()
        self._waiting.append(what)
        self._happened_at = time.monotonic()
        try:
            yield
        finally:
            self._waiting.remove(what)
            self._happened_at = time.monotonic()

    def happened(self, *, seen: bool) -> None:
        """Note that the run made progress; `seen` if the console showed it."""
        self._happened_at = time.monotonic()
        if seen:
            self._said_at = self._happened_at

    def note(self, text: str) -> None:
        """Print a line of text, which may be untrusted."""
        self.happened(seen=True)
        print_plain(self._console, text)

    def _listen(self) -> None:
        while True:
            time.sleep(LISTEN_EVERY_S)
            now, waiting = time.monotonic(), self._waiting[-1:]
            if waiting and now - self._said_at >= SILENCE_S:
                self._said_at, quiet_s = now, now - self._happened_at
                # A wait that has just started is not a silence.
                since = f" since {duration(quiet_s)}" if quiet_s >= SILENCE_S else ""
                print_plain(self._console, f"waiting for {waiting[0]}{since}{self.late()}")


def duration(seconds: float) -> str:
    """Return seconds as text."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 600:
        return f"{minutes / 60:.0f} h"
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def print_plain(console: RichConsole, text: str) -> None:
    """Print text without markup and without breaking long lines.

    Control characters are removed, because a reason may quote a model or a web page.
    """
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
