"""What can happen to a run. Each fault is a function that says what it did, or None where it cannot happen now."""

import errno
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ray_jobs.checks.chaos.job import EVERYTHING, LOOK_S, PARTS, Job, send
from ray_jobs.checks.chaos.machines import Machines
from rollout.store.lifecycle import group_id

SHORT_PAUSE_S = 20.0
DISK_STAYS_FULL_S = 15.0
MACHINE_STAYS_AWAY_S = 20.0
POISON_S = 900.0
"""Within so long a task that kills each worker has failed: `rollout.max_attempts` starts of a worker, and more."""
UNENDED = ("queued", "running")
WAL_HEADER = 32
SMALL_DISK = 4 * 2**30
"""Only a disk of at most so many bytes is filled: it was made for this."""


@dataclass(slots=True)
class Stage:
    """The job, the machines that it runs on besides its own (None where it starts a Ray of its own), the random numbers
    of the schedule, what it may have of workers, and the groups that were made to kill their workers."""

    job: Job
    rng: random.Random
    max_workers: int
    machines: Machines | None = None
    poisoned: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)


Fault = Callable[[Stage], str | None]


def killed(stage: Stage, part: str, pid: int) -> str:
    """SIGKILL; with the driver all that it started."""
    stage.job.kill(part, pid)
    return f"killed {part}"


def paused(stage: Stage, part: str, pid: int) -> str:
    """It stands still for a while, as on a machine that swaps, and goes on."""
    seconds = stage.rng.uniform(1.0, SHORT_PAUSE_S)
    send(pid, signal.SIGSTOP)
    time.sleep(seconds)
    send(pid, signal.SIGCONT)
    return f"paused {part} for {seconds:.0f} s"


def hung(stage: Stage, part: str, pid: int) -> str:
    """It stands still for good: it must be found and replaced."""
    send(pid, signal.SIGSTOP)
    return f"hung {part}"


def _to_process(happens: Callable[[Stage, str, int], str], part: str) -> Fault:
    """Of this part."""

    def fault(stage: Stage) -> str | None:
        pid = _one_of(stage, part)
        return None if pid is None else happens(stage, part, pid)

    return fault


def resized(stage: Stage) -> str | None:
    """Somebody writes another number into the run's `workers` file."""
    if not stage.job.rolls_out:
        return None
    wanted = stage.rng.randint(1, stage.max_workers)
    (stage.job.folder / "workers").write_text(f"{wanted}\n")
    return f"asked for {wanted} workers"


def machine_lost(stage: Stage) -> str | None:
    """The second machine goes down with all that runs there, and comes back."""
    if stage.machines is None or not stage.job.runs:
        return None
    stage.machines.lose_last()
    time.sleep(stage.rng.uniform(0.0, MACHINE_STAYS_AWAY_S))
    stage.machines.add(stage.machines.num_cpus)
    return "lost a machine, and added one"


def disk_full(stage: Stage) -> str | None:
    """The disk with the run's folder, a small one that was made for this, is full for a while."""
    folder = stage.job.folder
    if not folder.exists() or not stage.job.runs:
        return None
    size = os.statvfs(folder)
    if size.f_frsize * size.f_blocks > SMALL_DISK:
        return None
    ballast = folder.parent / "ballast"
    try:
        _fill(ballast)
        time.sleep(DISK_STAYS_FULL_S)
    finally:
        ballast.unlink()
    return f"filled the disk for {DISK_STAYS_FULL_S:.0f} s"


def power_cut(stage: Stage) -> str | None:
    """Everything is killed, and the end of what was written since is lost: of the ledger's log and of the rows."""
    if (pid := _one_of(stage, EVERYTHING)) is None:
        return None
    # Of a ledger that a process has open the end cannot be lost; to take it away then destroys the file.
    stage.job.lose(pid)
    log = stage.job.folder / "ledger.sqlite-wal"
    lost = 0
    if log.exists() and log.stat().st_size > WAL_HEADER:
        size = log.stat().st_size
        kept = stage.rng.randint(WAL_HEADER, size)
        os.truncate(log, kept)
        lost = size - kept
    return f"cut the power: {lost} bytes of the ledger's log are lost"


def second_resume(stage: Stage) -> str | None:
    """Somebody resumes a run that is on; it must be refused."""
    if not stage.job.rolls_out:
        return None
    said = subprocess.run(stage.job.resume, env=stage.job.environment, capture_output=True, text=True, timeout=300)
    if not stage.job.runs:
        return "resumed a run that had just ended"
    if said.returncode != 2 or "works on the run in" not in said.stdout + said.stderr:
        stage.complaints.append(f"a second resume was not refused: {(said.stdout + said.stderr)[-300:]}")
    return "resumed the run a second time"


def poison(stage: Stage) -> str | None:
    """One task kills every worker that tries it, until its group has failed. The run has one worker meanwhile, for from
    outside nobody sees which process runs what."""
    if not stage.job.rolls_out:
        return None
    (stage.job.folder / "workers").write_text("1\n")
    deadline = time.monotonic() + POISON_S
    victim, deaths = None, 0
    while stage.job.runs and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        states, workers = _states(stage.job.folder), stage.job.alive().get("rollout", [])
        running = sorted(ordinal for ordinal, state in states.items() if state == "running")
        if victim is None and running and len(workers) == 1:
            victim = stage.rng.choice(running)
        if victim is not None and states.get(victim) not in UNENDED:
            break
        if victim in running:
            deaths += len(workers)
            for pid in workers:
                send(pid, signal.SIGKILL)
    if victim is None:
        return None
    stage.poisoned.add(group_id(victim))
    if stage.job.runs and _states(stage.job.folder).get(victim) in UNENDED:
        stage.complaints.append(f"{group_id(victim)} killed {deaths} workers in {POISON_S:.0f} s, and has not failed")
    return f"poisoned {group_id(victim)}: {deaths} workers died of it"


FAULTS: dict[str, Fault] = {
    **{f"kill-{part}": _to_process(killed, part) for part in (EVERYTHING, *PARTS)},
    **{f"pause-{part}": _to_process(paused, part) for part in PARTS},
    **{f"hang-{part}": _to_process(hung, part) for part in PARTS},
    "workers": resized,
    "machine": machine_lost,
    "disk": disk_full,
    "power": power_cut,
    "resume-twice": second_resume,
    "poison": poison,
}


def _one_of(stage: Stage, part: str) -> int | None:
    pids = stage.job.alive().get(part)
    return stage.rng.choice(sorted(pids)) if pids else None


def _states(folder: Path) -> dict[int, str]:
    """The state of every group, by ordinal; none where the ledger is not there or busy."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{folder}/ledger.sqlite?mode=ro", uri=True)) as ledger:
        return dict(ledger.execute("SELECT ordinal, state FROM groups"))
    return {}


def _fill(ballast: Path) -> None:
    """Write until nothing fits any more."""
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
