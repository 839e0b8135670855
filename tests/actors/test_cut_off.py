"""The driver is killed, and with it everything: another process resumes the run from its newest checkpoint."""

import os
import random
import sys
import time
from pathlib import Path

import pytest
from stage import ROOT, WAIT_S, steps_of, trained_once, wait_until

from tests.faults.audit import differences
from tests.faults.job import Job

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

PLAY = Path(__file__).parent / "play.py"
NUM_TASKS = 40


class Played(Job):
    """A run with simulated parts, which is resumed as it was started."""

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


def finish(job):
    assert job.process.wait(WAIT_S) == 0, job.said().decode()[-3000:]
    return job.folder


def wait_for_step(job, step):
    wait_until(lambda: len(steps_of(job.folder)) >= step or not job.runs)
    assert job.runs, job.said().decode()[-3000:]


def keep_running_until(job, step):
    """A job whose part was killed may end some time later."""

    def is_there():
        job.ensure_running()
        return len(steps_of(job.folder)) >= step

    wait_until(is_there)


def kill_all(job):
    job.kill("driver", job.process.pid)


def trained_tasks(folder):
    return sorted(row["task_number"] for row in trained_once(folder))


def test_run_that_is_cut_off_again_and_again_trains_the_tasks_of_an_undisturbed_one(tmp_path):
    options = (f"max_tasks={NUM_TASKS}", "num_steps=100", "learner.checkpoint_every=3")
    undisturbed = play(tmp_path / "undisturbed", *options)
    expected = trained_tasks(finish(undisturbed))
    job = play(tmp_path / "cut_off", *options)
    for step in (1, 4, 8):
        wait_for_step(job, step)
        kill_all(job)
        job.ensure_running()
    assert trained_tasks(finish(job)) == expected
    assert 0 < len(expected) < NUM_TASKS


def kill_one(part):
    def fault(job):
        for pid in job.alive().get(part, []):
            job.kill(part, pid)

    return fault


def ask_to_end(job):
    """SIGTERM."""
    job.process.terminate()
    job.process.wait(WAIT_S)


CUT_OFFS = (kill_all, kill_one("rollout"), kill_one("sampling"), kill_one("learner"), ask_to_end, kill_all)


def test_synchronous_run_ends_with_the_bytes_of_an_undisturbed_one(tmp_path):
    options = ("pipeline_depth=0", "num_steps=22", "learner.checkpoint_every=2")
    mixed = ("envs.mix={lookup = 0.5, chain = 0.5}",)
    soon = ("cluster.answer_s=20",)
    other = finish(play(tmp_path / "undisturbed", *options, *mixed))
    job, rng = play(tmp_path / "cut_off", *options, *mixed, *soon), random.Random(0)
    for number, cut_off in enumerate(CUT_OFFS):
        keep_running_until(job, 3 * number + 1)
        time.sleep(rng.uniform(0.0, 1.0))
        cut_off(job)
    job.ensure_running()
    assert differences(finish(job), other) == []


def test_second_process_on_a_folder_ends_with_one_clear_error(tmp_path):
    first = play(tmp_path / "run", "max_tasks=100000", "num_steps=100000")
    elsewhere = {"folder": tmp_path / "none", "log": tmp_path / "second.txt"}
    second = Played(start=first.start, environment=first.environment, **elsewhere)
    try:
        wait_for_step(first, 1)
        second.ensure_running()
        assert second.process.wait(WAIT_S) != 0
        assert first.runs
        assert "UserError" in second.said().decode()
    finally:
        kill_all(first)
