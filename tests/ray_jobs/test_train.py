"""The synchronous job for real: bit for bit, evaluations on the way, a kill and a resume change nothing of a run."""

import shutil
import sys

import pytest
from real_run import WAIT_S, attempts_of, read, wait_for_train_step

from rollout.files import read_records
from tests.faults.audit import faults_of
from tests.faults.job import Job

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder):
    """A run that is evaluated after each step. It was killed after its first train step, with all that it had started,
    moved, and resumed there."""
    job = begin(folder, "killed", "evaluation.every_steps=1", "evaluation.while_training_tasks=4")
    wait_for_train_step(job, 1)
    job.kill("driver", job.process.pid)
    job.folder = (folder / "elsewhere").absolute() / "moved"
    job.folder.parent.mkdir()
    shutil.move(folder / "killed", job.folder)
    job.ensure_running()
    return end(job)


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The same recipe and seed, undisturbed, and evaluated only before and after."""
    return end(begin(folder, "undisturbed"))


def begin(folder, name, *overrides):
    # So many lazy demonstrations leave groups with signal for full batches.
    recipe = ("configs/recipes/sync_cpu.toml", "cold_start.lazy_share=0.5")
    command = [sys.executable, "-m", "ray_jobs.cli", "train", *recipe]
    start = [*command, f"name={name}", f"output_dir={folder}", *overrides]
    job = Job(start=start, folder=folder / name, log=folder / f"{name}.log")
    job.ensure_running()
    return job


def end(job):
    assert job.process.wait(timeout=WAIT_S) == 0, job.log.read_text()[-4000:]
    return job.folder


def newest_manifest(folder):
    return read(max((folder / "checkpoints").glob("v*")) / "manifest.json")


def test_killed_run_ends_with_the_same_adapter(run, undisturbed):
    whole, killed = newest_manifest(undisturbed), newest_manifest(run)
    assert whole["step"] == killed["step"] == 3
    assert whole["files"]["adapter.safetensors"] == killed["files"]["adapter.safetensors"]


def test_every_step_is_evaluated_once(run):
    rows = [row for row in read_records(run / "metrics.jsonl") if "held_out/unscored" in row]
    assert [(row["step"], row["held_out/tasks"] + row["held_out/unscored"]) for row in rows] == [(1, 4), (2, 4)]
    attempts = [row for row in attempts_of(run) if row["phase"] in ("held_out", "eval_after")]
    tasks = {step: [row["task_id"] for row in attempts if row["step"] == step] for step in (1, 2, None)}
    assert tasks[1] == tasks[2] == [id for id in tasks[None] if id in tasks[1]]
    versions = {row["step"]: row["held_out/policy_version"] for row in rows}
    assert all(row["versions"] == [versions[row["step"]]] * 2 for row in attempts if row["step"])


def test_nothing_is_lost_or_duplicated_and_nothing_is_stale(run, undisturbed):
    """A resumed run gives the same weights another number, which makes what they sampled before no older."""
    assert faults_of(run) == []
    summaries = [read(one / "summary.json") for one in (run, undisturbed)]
    assert [summary["groups"]["trained"] for summary in summaries] == [6, 6]
    assert [summary["staleness"]["max"] for summary in summaries] == [0, 0]
