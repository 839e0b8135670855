"""Seeded faults in a small real run: every part is killed and stopped, a node is lost, the disk is full, a log is cut.

The run finishes, or ends with one line that says how to resume it. No group is lost or trained twice, and the console
is never silent for more than a minute.
"""

import errno
import os
import random
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.runs import copy_before_rl
from configs.loading import load_run_config
from ray_jobs.run.folder import PHASES
from rollout.files import read_json
from tests.faults.audit import faults_of, steps_of
from tests.faults.job import Job, send
from tests.faults.machines import Machines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

WAIT_S = 1800.0
MAX_SILENCE_S = 60.0
SMALL_DISK = 4 * 2**30
"""Only a disk of at most this size is filled: it was made for this test."""
SMALL = (
    *("num_steps=12", "batch_groups=2", "pipeline_depth=2", "max_empty_batches=60", "envs.mix={lookup = 1.0}"),
    *("rollout.group_size=4", "agent.max_steps=4", "rollout.max_turn_tokens=40", "agent.format_retries=0"),
    *("learner.checkpoint_every=2", "cold_start.num_demonstrations=104", "cold_start.lazy_share=0.5"),
    *("collect.num_tasks=8", "collect.rollouts_per_task=4", "prm.num_layers=4", "prm.num_epochs=1"),
    *("evaluation.num_tasks=8", "evaluation.num_untouched_tasks=0"),
    "cluster.answer_s=15",
)
RECIPE = "configs/recipes/prm_cpu.toml"
PARTS = ("rollout", "prm", "learner", "sampling")


def start(before_rl, folder, *overrides):
    settings = load_run_config(Path(RECIPE), [*SMALL, f"output_dir={folder}", "name=r", *overrides])
    copy_before_rl(before_rl, folder / "r", settings)
    return Job(start=(), folder=folder / "r", log=folder / "console.log")


def run_until(job, condition):
    """Keep the job running, resumed if it ended early, until the condition holds; an end must name its resumption."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, job.said().decode()[-3000:]
        if not job.runs and not job.finished:
            check_said(job)
            job.ensure_running()
        time.sleep(0.5)


def check_said(job):
    """A job that has ended by itself says so in one line."""
    if job.process is not None and job.process.returncode > 0:
        said = job.said().decode()
        assert "agentflow resume" in said, said[-3000:]
        assert "Traceback" not in said, said[-3000:]


def finish(job):
    run_until(job, lambda: job.finished)
    assert faults_of(job.folder) == []
    assert job.longest_silence_s < MAX_SILENCE_S


def process_of(job, part, rng):
    """Return the id of one process of a part, once there is one."""
    run_until(job, lambda: job.finished or job.alive().get(part))
    pids = job.alive().get(part)
    return rng.choice(sorted(pids)) if pids else None


def disturb(job, fault, part, rng):
    """Kill a process of a part, stop it for good, or pause it for some seconds, as on a machine that swaps."""
    if (pid := process_of(job, part, rng)) is None:
        return
    if fault == "kill":
        job.kill(part, pid)
        return
    send(pid, signal.SIGSTOP)
    if fault == "pause":
        time.sleep(rng.uniform(1.0, 15.0))
        send(pid, signal.SIGCONT)


@contextmanager
def running(job):
    job.ensure_running()
    try:
        yield job
    finally:
        job.end()


@pytest.fixture(scope="module")
def before_rl(tmp_path_factory):
    """A run that was killed when it began to reinforce. Every test continues from a copy of it."""
    folder = tmp_path_factory.mktemp("before")
    command = [sys.executable, "-m", "ray_jobs.cli", "train", RECIPE, *SMALL, f"output_dir={folder}", "name=r"]
    with running(Job(start=command, folder=folder / "r", log=folder / "console.log")) as job:
        phases = job.folder / PHASES
        run_until(job, lambda: phases.exists() and "reinforce" in read_json(phases))
        job.kill("driver", job.process.pid)
    return job.folder


@pytest.mark.parametrize("seed", range(2))
def test_parts_are_killed_stopped_and_paused_at_random_times(before_rl, tmp_path, seed):
    rng = random.Random(seed)
    faults = [(fault, part) for fault in ("kill", "stop", "pause") for part in PARTS] + [("kill", "driver")]
    rng.shuffle(faults)
    with running(start(before_rl, tmp_path)) as job:
        for number, (fault, part) in enumerate(faults):
            run_until(job, lambda: job.finished or len(steps_of(job.folder)) > number * 10 // len(faults))  # noqa: B023
            if job.finished:
                break
            time.sleep(rng.uniform(0.0, 5.0))
            disturb(job, fault, part, rng)
        finish(job)


def test_truncated_log_is_repaired_when_the_run_is_resumed(before_rl, tmp_path):
    rng = random.Random(0)
    with running(start(before_rl, tmp_path)) as job:
        run_until(job, lambda: len(steps_of(job.folder)) >= 5)
        disturb(job, "kill", "driver", rng)
        for name in ("metrics.jsonl", "groups.jsonl", "trajectories.jsonl"):
            path = job.folder / name
            # Rows of the newest checkpoint are synced; what was written later may be lost.
            os.truncate(path, path.stat().st_size - rng.randrange(1, 60))
        finish(job)


def test_full_disk_ends_the_run_with_one_line_and_space_lets_it_continue(before_rl, tmp_path):
    """Needs TMPDIR, or --basetemp, on a small disk that was made for this."""
    disk = os.statvfs(tmp_path)
    if disk.f_frsize * disk.f_blocks > SMALL_DISK:
        pytest.skip(f"the disk of {tmp_path} is larger than {SMALL_DISK >> 30} GiB, and would be filled")
    ballast = tmp_path / "ballast"
    with running(start(before_rl, tmp_path)) as job:
        run_until(job, lambda: len(steps_of(job.folder)) >= 3)
        fill(ballast)
        job.process.wait(WAIT_S)
        ballast.unlink()
        finish(job)


def fill(path):
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def test_lost_node_costs_the_groups_that_ran_there(before_rl, tmp_path):
    machines = Machines(tmp_path)
    try:
        machines.start_head(num_cpus=2)
        machines.add(num_cpus=1)
        cluster = (f"cluster.address={machines.address}", "cluster.patience_s=120")
        job = start(before_rl, tmp_path, "rollout.num_workers=2", *cluster)
        job.environment, job.others = machines.environment, machines.roots
        with running(job):
            run_until(job, lambda: len(steps_of(job.folder)) >= 3)
            machines.lose_last()
            run_until(job, lambda: job.finished or len(steps_of(job.folder)) >= 6)
            machines.add(num_cpus=1)
            finish(job)
    finally:
        machines.stop()
