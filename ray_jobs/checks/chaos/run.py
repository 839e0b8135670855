"""Do a random schedule of faults to a small job, resume it where it ends, and see whether anything was lost."""

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from configs.errors import UserError
from configs.run import RunConfig
from ray_jobs.checks.chaos.audit import audit, differences
from ray_jobs.checks.chaos.faults import FAULTS, Stage
from ray_jobs.checks.chaos.job import Job
from ray_jobs.checks.chaos.machines import Machines

MEAN_PAUSE_S = 8.0
MAX_WAIT_S = 900.0
"""Within so long a job that was begun or resumed begins to roll out, or has ended."""
MAX_SILENCE_S = 60.0
"""The console says something at least so often, while the machine is not stopped."""
ANYWHERE = 0.2
"""So many of the faults wait for no phase: they may hit a start, the cold start or an evaluation."""
LASTING = ("poison", "workers")
"""After these a job ends otherwise than its twin."""
HEAD_CPUS, SECOND_CPUS = 4, 2


class ChaosError(UserError):
    """The job did not survive; the message says how it ended."""


def run_chaos(
    config: RunConfig,
    start: Sequence[str],
    *,
    num_faults: int,
    seed: int,
    only: Sequence[str],
    two_machines: bool,
    twin: Path | None = None,
) -> int:
    """Run the job that `start` begins under so many random faults (of these kinds, of all by default), and print what
    was found as JSON. `twin`: the folder of the same job, left in peace, whose end this one must have; then no fault
    happens by default that changes it. Returns 0 when it is sound. Raises ChaosError when the job cannot go on."""
    _check_asked(config, only, twin)
    console, began = Console(stderr=True), time.monotonic()
    folder = config.run_path.absolute()
    if (folder / "summary.json").exists():
        raise ChaosError(f"the run in '{folder}' has ended, so that no fault can meet it; choose another name=...")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _job(config, start, folder, two_machines=two_machines) as (job, machines):
        stage = Stage(
            job=job,
            rng=random.Random(f"chaos|{seed}"),
            max_workers=max(config.rollout.num_workers, config.rollout.max_workers or 0),
            machines=machines,
        )
        done = _shoot(stage, console, num_faults, only or [kind for kind in FAULTS if not (twin and kind in LASTING)])
    found = audit(folder, num_poisoned=len(stage.poisoned))
    if twin:
        stage.complaints.extend(differences(folder, twin))
    checks = {
        **found.pop("checks"),
        "no_silent_minute": job.longest_silence_s <= MAX_SILENCE_S,
        "no_traceback": b"Traceback (most recent call last)" not in job.log.read_bytes(),
        "nothing_else": not stage.complaints,
    }
    facts: dict[str, object] = {
        "seed": seed,
        "faults": dict(done),
        "starts": job.num_starts,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "longest_silence_s": round(job.longest_silence_s, 1),
        "poisoned": sorted(stage.poisoned),
        "complaints": stage.complaints,
        **found,
        "checks": checks,
        "sound": all(checks.values()),
    }
    print(json.dumps(facts, indent=2))
    return 0 if facts["sound"] else 1


def _check_asked(config: RunConfig, only: Sequence[str], twin: Path | None) -> None:
    if unknown := sorted({*only} - {*FAULTS}):
        raise ChaosError(f"there are the faults {', '.join(FAULTS)}; got {', '.join(unknown)}")
    if twin and config.pipeline_depth:
        raise ChaosError(f"only a job with pipeline_depth=0 has a twin; this one has {config.pipeline_depth}")
    if twin and not (twin / "summary.json").exists():
        raise ChaosError(f"'{twin}' is not the folder of a job that has ended; run it first, with the same settings")


@contextmanager
def _job(
    config: RunConfig, start: Sequence[str], folder: Path, *, two_machines: bool
) -> Iterator[tuple[Job, Machines | None]]:
    """The job, on a Ray of its own, or on a cluster of two machines that are started for it."""
    job = Job(start=start, folder=folder, log=folder.parent / f"{folder.name}.chaos.log")
    machines = None
    with tempfile.TemporaryDirectory(prefix="agentflow-") as name:
        try:
            if two_machines:
                machines = Machines(Path(name))
                machines.start_head(num_cpus=HEAD_CPUS)
                machines.add(SECOND_CPUS)
                job.start = [*start, f"cluster.address={machines.address}"]
                job.environment, job.others = machines.environment, machines.roots
            yield job, machines
        finally:
            job.end()
            if machines:
                machines.stop()


def _shoot(stage: Stage, console: Console, num_faults: int, kinds: Sequence[str]) -> Counter[str]:
    """Let the faults happen one after the other until all have, and the job until it has ended."""
    job, done, began = stage.job, Counter[str](), time.monotonic()
    while not job.finished:
        job.ensure_running()
        if done.total() >= num_faults:
            time.sleep(1.0)
            continue
        if stage.rng.random() >= ANYWHERE:
            _wait_until_it_rolls_out(job)
        time.sleep(stage.rng.expovariate(1 / MEAN_PAUSE_S))
        kind = stage.rng.choice(kinds)
        if said := FAULTS[kind](stage):
            done[kind] += 1
            minutes = (time.monotonic() - began) / 60
            console.print(f"{done.total()} after {minutes:.1f} min: {said}", highlight=False)
        if job.num_starts > num_faults + 3:
            raise ChaosError(f"the job was started {job.num_starts} times for {done.total()} faults; see {job.log}")
    return done


def _wait_until_it_rolls_out(job: Job) -> None:
    """Or has ended. Raises ChaosError."""
    deadline = time.monotonic() + MAX_WAIT_S
    while job.runs and not job.rolls_out:
        if time.monotonic() > deadline:
            raise ChaosError(f"no RL phase within {MAX_WAIT_S:.0f} s; see {job.log}")
        time.sleep(0.2)
