"""Kill parts of a small job at random, resume it when its driver is hit, and see whether anything was lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.run import RunConfig
from learner.checkpoint import newest_checkpoint, read_manifest
from ray_jobs.run_folder import METRICS, run_path
from rollout.adapter_store import AdapterStore
from rollout.ledger import Ledger
from rollout.records import read_records

PARTS = {
    "rollout": "RolloutWorkerActor",
    "prm": "PrmActor",
    "learner": "Learner",
    "store": "StoreActor",
}
"""What stands in the titles of the processes of a run's actors."""
EVERYTHING = "driver"
"""With the driver goes all that it started, as when a machine goes down."""

RL_PHASE = b"reinforce ..."
MEAN_PAUSE_S = 8.0
MAX_WAIT_S = 600.0


class ChaosError(RuntimeError):
    """The job did not survive; the message says how it ended."""


@dataclass(slots=True)
class Job:
    """The job as a user runs it: a process, started anew with `resume` whenever it ended before its time."""

    start: Sequence[str]
    folder: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0
    logged_before: int = 0
    kills: Counter[str] = field(default_factory=Counter)

    def ensure_running(self) -> None:
        """Start the job, or resume it where it was killed."""
        if self.finished or (self.process and self.process.poll() is None):
            return
        resume = [sys.executable, "-m", "ray_jobs.cli", "resume", str(self.folder)]
        command = resume if (self.folder / "config.json").exists() else self.start
        self.num_starts += 1
        self.logged_before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    @property
    def finished(self) -> bool:
        return (self.folder / "summary.json").exists() and (self.process is None or self.process.poll() is not None)

    @property
    def rolls_out(self) -> bool:
        """The RL phase of the process that was started last is on. Earlier phases lose nothing but their own time."""
        with self.log.open("rb") as log:
            log.seek(self.logged_before)
            return RL_PHASE in log.read()

    def alive(self) -> dict[str, list[int]]:
        """Process ids by part, among the descendants of the job's driver only."""
        if self.process is None or self.process.poll() is not None:
            return {}
        found: dict[str, list[int]] = {EVERYTHING: [self.process.pid]}
        for pid in _descendants(self.process.pid):
            if part := part_of(_title(pid)):
                found.setdefault(part, []).append(pid)
        return found

    def kill(self, part: str, pid: int) -> None:
        """SIGKILL one process, or with the driver everything."""
        assert self.process is not None
        hit = [pid, *_descendants(pid)] if part == EVERYTHING else [pid]
        for one in hit:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        if part == EVERYTHING:
            self.process.wait()
        self.kills[part] += 1


def part_of(title: str) -> str | None:
    """The part that a process of Ray with this title is. While an actor starts, its name stands before its class."""
    return next((part for part, name in PARTS.items() if title.startswith("ray::") and name in title), None)


def run_chaos(config: RunConfig, start: Sequence[str], *, kills: int, seed: int, parts: Sequence[str] | None) -> int:
    """Run the job that `start` begins under `kills` random kills of these parts (of all by default), and print the
    ledger's totals as JSON. Returns 0 when every group is accounted for and none was trained twice. Raises ChaosError
    when the job cannot go on."""
    known = (EVERYTHING, *PARTS)
    if unknown := sorted({*(parts or ())} - {*known}):
        raise ChaosError(f"a run has the parts {', '.join(known)}, got {', '.join(unknown)}")
    console, rng = Console(stderr=True), random.Random(f"chaos|{seed}")
    folder = run_path(config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    job = Job(start=start, folder=folder, log=folder.parent / f"{folder.name}.chaos.log")
    try:
        while not job.finished:
            job.ensure_running()
            if sum(job.kills.values()) < kills:
                _kill_one(job, rng, console, parts or known)
            else:
                time.sleep(1.0)
            if job.num_starts > kills + 3:
                raise ChaosError(f"the job was started {job.num_starts} times for {kills} kills; see {job.log}")
    finally:
        if job.process and job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGTERM)
    found = audit(folder)
    print(json.dumps({"kills": dict(job.kills), "starts": job.num_starts, "seed": seed, **found}, indent=2))
    return 0 if found["sound"] else 1


def audit(folder: Path) -> dict[str, Any]:
    """What the run folder says about its groups, versions and steps; `sound` when nothing is lost or double."""
    ledger = Ledger(folder / "ledger.sqlite")
    counts = ledger.verify()
    tasks = Counter(ledger.trained_tasks())
    steps = [row["step"] for row in read_records(folder / METRICS) if "policy/loss" in row]
    group_steps = {
        (row["group_id"], row["step"]) for row in read_records(folder / "trajectories.jsonl") if row["phase"] == "train"
    }
    index = list(read_records(folder / "adapters" / "index.jsonl"))
    versions = [row["policy_version"] for row in index]
    checks = {
        "balanced": counts.balanced,
        "no_task_trained_twice": max(tasks.values(), default=1) == 1,
        "no_group_logged_in_two_steps": len({group for group, _ in group_steps}) == len(group_steps),
        "every_step_once": steps == list(range(1, len(steps) + 1)),
        "no_version_reused": versions == sorted(set(versions)),
        "nothing_failed": counts.failed == 0,
    }
    return {
        "ledger": {**asdict(counts), "filtered": counts.filtered, "live": counts.outstanding},
        "requeued": ledger.num_requeued(),
        "steps": len(steps),
        "versions_published": AdapterStore(folder / "adapters").num_published,
        "adapter": _newest_adapter(folder / "checkpoints"),
        "checks": checks,
        "sound": all(checks.values()),
    }


def _newest_adapter(checkpoints: Path) -> str | None:
    """The digest of the weights that the run ended with. At depth 0 it does not depend on what was killed."""
    checkpoint, _ = newest_checkpoint(checkpoints)
    return str(read_manifest(checkpoint.folder)["files"]["adapter.safetensors"]) if checkpoint else None


def _kill_one(job: Job, rng: random.Random, console: Console, parts: Sequence[str]) -> None:
    """Wait until the job rolls out, then a random while, then kill a random one of these parts of it."""
    deadline = time.monotonic() + MAX_WAIT_S
    while not job.rolls_out:
        if job.finished or job.process is None or job.process.poll() is not None:
            return
        if time.monotonic() > deadline:
            raise ChaosError(f"no RL phase within {MAX_WAIT_S:.0f} s; see {job.log}")
        time.sleep(0.2)
    time.sleep(rng.expovariate(1 / MEAN_PAUSE_S))
    alive = {part: pids for part, pids in job.alive().items() if part in parts}
    if not alive:
        return
    part = rng.choice(sorted(alive))
    job.kill(part, rng.choice(alive[part]))
    console.print(f"killed {part} ({sum(job.kills.values())})")


def _descendants(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, task.read_text().split())
    return [one for child in children for one in (child, *_descendants(child))]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
