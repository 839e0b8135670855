"""A job as a user runs it: a process that is resumed when it ended early, and its console log."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PARTS = {"rollout": "RolloutWorkerActor", "prm": "Prm", "learner": "Learner", "sampling": "DynamicSampling"}
"""Text in the titles of the processes of a run's actors."""
EVERYTHING = "driver"
"""The driver with all that it started."""

LOOK_S = 0.5
END_PATIENCE_S = 60.0
"""The driver stops its Ray meanwhile."""


@dataclass(slots=True)
class Job:
    """`others` returns the processes of the cluster that the job joins, if it does not start its own."""

    start: Sequence[str]
    folder: Path
    log: Path
    environment: Mapping[str, str] | None = None
    others: Callable[[], Sequence[int]] = tuple
    process: subprocess.Popen[bytes] | None = None
    logged_before: int = 0
    longest_silence_s: float = 0.0

    @property
    def resume(self) -> Sequence[str]:
        """The command that continues the run."""
        return [sys.executable, "-m", "ray_jobs.cli", "resume", str(self.folder)]

    def ensure_running(self) -> None:
        """Start the job, or resume it if it ended early."""
        if self.finished or self.runs:
            return
        command = self.resume if (self.folder / "config.json").exists() else self.start
        self.logged_before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=self.environment and dict(self.environment)
            )
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def finished(self) -> bool:
        return (self.folder / "summary.json").exists() and not self.runs

    def said(self) -> bytes:
        """Return what the newest process wrote to the console."""
        if not self.log.exists():
            return b""
        with self.log.open("rb") as log:
            log.seek(self.logged_before)
            return log.read()

    def alive(self) -> dict[str, list[int]]:
        """Return process ids by part."""
        if not self.runs:
            return {}
        assert self.process is not None
        found = {EVERYTHING: [self.process.pid]}
        for process in (one for root in (self.process.pid, *self.others()) for one in descendants(root)):
            if part := part_of(process):
                found.setdefault(part, []).append(process.pid)
        return found

    def kill(self, part: str, pid: int) -> None:
        """Kill one process, or with the driver everything that it started."""
        assert self.process is not None
        hit = [pid, *(one.pid for one in descendants(pid))] if part == EVERYTHING else [pid]
        for one in hit:
            send(one, signal.SIGKILL)
        if part == EVERYTHING:
            self.process.wait()

    def end(self) -> None:
        """End a job that still runs."""
        if not self.runs:
            return
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill(EVERYTHING, self.process.pid)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Measure how long the console stays silent while this process lives and is not stopped."""
        size, since = -1, time.monotonic()
        while process.poll() is None:
            now = self.log.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
            self.longest_silence_s = max(self.longest_silence_s, time.monotonic() - since)
            time.sleep(LOOK_S)


def part_of(process: psutil.Process) -> str | None:
    """Return the part that is a process of Ray. While an actor starts, its name is in front of its class."""
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        return None
    return next((part for part, name in PARTS.items() if title.startswith("ray::") and name in title), None)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
