"""The driver is killed, and with it everything: another process goes on where the folder says the run was."""

import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray_jobs.checks.chaos.faults import FAULTS, Stage
from stage import PATIENCE_S, ROOT, begun_with_again, check_nothing_lost, groups_of, steps_of, tasks_of, wait_until

from rollout.records import read_records
from rollout.store.lifecycle import group_id
from tests.faults.audit import differences
from tests.faults.job import Job

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

PLAY = Path(__file__).parent / "play.py"
NUM_TASKS = 40
OPTIONS = (f"max_tasks={NUM_TASKS}", "num_steps=100", "learner.checkpoint_every=3")


def start(folder, *options):
    folder.mkdir(exist_ok=True)
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(PLAY), str(folder), *OPTIONS, *options],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/actors:{ROOT}/tests/rollout"},
            stdout=log,
            stderr=log,
        )


def finish(process, folder):
    assert process.wait(PATIENCE_S) == 0, (folder / "log.txt").read_text()[-2000:]


def kill_all(process):
    """As when a machine goes down."""
    driver = psutil.Process(process.pid)
    everything = [*driver.children(recursive=True), driver]
    for one in everything:
        one.kill()
    psutil.wait_procs(everything[:-1])
    process.wait()


def has_logged(folder, num_steps):
    return (folder / "r" / "metrics.jsonl").exists() and len(steps_of(folder / "r")) >= num_steps


def test_run_that_is_cut_off_again_and_again_trains_what_an_undisturbed_one_trains(tmp_path):
    undisturbed, cut_off = tmp_path / "undisturbed", tmp_path / "cut_off"
    finish(start(undisturbed), undisturbed)
    for num_steps in (1, 4, 8):
        process = start(cut_off)
        wait_until(lambda: has_logged(cut_off, num_steps) or process.poll() is not None)  # noqa: B023
        assert process.poll() is None, (cut_off / "log.txt").read_text()[-2000:]
        kill_all(process)
    finish(start(cut_off), cut_off)
    for folder in (undisturbed, cut_off):
        counts = check_nothing_lost(folder / "r")
        assert (counts.trained + counts.filtered, counts.outstanding) == (NUM_TASKS, 0)
    expected = tasks_of(groups_of(undisturbed / "r", "trained"))
    assert tasks_of(groups_of(cut_off / "r", "trained")) == expected
    assert 0 < len(expected) < NUM_TASKS
    # Regression: after a resume workers sampled with the first policy until they had taken up the checkpoint's.
    again = begun_with_again(cut_off / "r")
    assert len(again) == 3
    assert not again.intersection(
        *(map(int, json.loads(row["versions"])) for row in groups_of(cut_off / "r", "trained"))
    )
    # A run that is cut off is no fault of its groups.
    assert all(row["attempt"] == 1 for row in groups_of(cut_off / "r"))


def test_synchronous_run_that_is_cut_off_chooses_what_an_undisturbed_one_chooses(tmp_path):
    undisturbed, cut_off = tmp_path / "undisturbed", tmp_path / "cut_off"
    options = ("pipeline_depth=0", "envs.choice=learnable", "envs.mix={lookup = 0.5, chain = 0.5}")
    finish(start(undisturbed, *options), undisturbed)
    for num_steps in (2, 7):
        process = start(cut_off, *options)
        wait_until(lambda: has_logged(cut_off, num_steps) or process.poll() is not None)  # noqa: B023
        assert process.poll() is None, (cut_off / "log.txt").read_text()[-2000:]
        kill_all(process)
    finish(start(cut_off, *options), cut_off)
    expected, found = (
        [(row["ordinal"], row["task"], row["family"], row["state"], row["step"]) for row in groups_of(folder / "r")]
        for folder in (undisturbed, cut_off)
    )
    assert found == expected
    assert {family for _, _, family, _, _ in found} == {"lookup", "chain"}
    recorded = {row["group_id"]: row["dataset"] for row in read_records(cut_off / "r" / "trajectories.jsonl")}
    trained = {group_id(row["ordinal"]): row["family"] for row in groups_of(cut_off / "r", "trained")}
    assert {group: recorded[group] for group in trained} == trained
    rows = list(read_records(undisturbed / "r" / "metrics.jsonl"))
    assert all(row["mix/lookup"] + row["mix/chain"] == pytest.approx(1.0) for row in rows)


def full_disk(stage):
    """The store's files take nothing more, as on a full disk; its run ends with one line."""
    (pid,) = stage.job.alive()["store"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    stage.job.process.wait(PATIENCE_S)


def asked_to_end(stage):
    """SIGTERM."""
    stage.job.process.terminate()
    stage.job.process.wait(PATIENCE_S)


MIXED_CUT_OFFS = (
    FAULTS["kill-driver"],
    FAULTS["kill-rollout"],
    FAULTS["kill-store"],
    FAULTS["hang-rollout"],
    FAULTS["kill-learner"],
    full_disk,
    FAULTS["pause-store"],
    asked_to_end,
    FAULTS["hang-learner"],
    FAULTS["power"],
)


class Played(Job):
    """A run with simulated parts, which goes on as it was begun."""

    @property
    def resume(self):
        return self.start


def play(folder, *options):
    folder.mkdir()
    job = Played(
        start=[sys.executable, str(PLAY), str(folder), *options],
        folder=folder / "r",
        log=folder / "log.txt",
        environment=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/actors:{ROOT}/tests/rollout"},
    )
    job.ensure_running()
    return job


def test_synchronous_run_ends_with_the_bytes_of_an_undisturbed_one_after_ten_cut_offs_of_mixed_kinds(tmp_path):
    options = ("pipeline_depth=0", "num_steps=34", "learner.checkpoint_every=2")
    soon = ("liveness.answer_s=12", "liveness.work_s=12", "liveness.start_s=240")
    twin = play(tmp_path / "undisturbed", *options)
    assert twin.process.wait(PATIENCE_S) == 0, twin.said().decode()[-2000:]
    job = play(tmp_path / "cut_off", *options, *soon)
    stage = Stage(job=job, rng=random.Random(0), max_workers=1)
    for num, cut_off in enumerate(MIXED_CUT_OFFS):
        wait_until(lambda: has_logged(tmp_path / "cut_off", 3 * num + 1) or not job.runs)  # noqa: B023
        assert job.runs, job.said().decode()[-2000:]
        time.sleep(stage.rng.uniform(0.0, 1.0))
        cut_off(stage)
        job.ensure_running()
    assert job.process.wait(PATIENCE_S) == 0, job.said().decode()[-2000:]
    check_nothing_lost(job.folder)
    assert differences(job.folder, twin.folder) == []
    assert job.num_starts == 5
    assert len({row["attempt"] for row in groups_of(job.folder)}) > 1, "no round was cut off"


def test_second_process_on_a_folder_ends_with_one_clear_error(tmp_path):
    long = ("max_tasks=100000", "num_steps=100000")
    first = start(tmp_path, *long)
    try:
        wait_until(lambda: has_logged(tmp_path, 1))
        second = start(tmp_path, *long)
        assert second.wait(PATIENCE_S) != 0
        assert first.poll() is None
        said = (tmp_path / "log.txt").read_text()
        assert f"RunLockError: process {first.pid} on " in said
        assert "works on the run in" in said
        assert "wait for it, or stop it first" in said
    finally:
        if first.poll() is None:
            kill_all(first)
