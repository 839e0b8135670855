"""Helpers that read the folder of a real run, also while its job runs."""

import json
import time

from rollout.codec import flat_record, read_trajectories
from rollout.files import read_records

WAIT_S = 900


def read(path):
    return json.loads(path.read_text())


def attempts_of(folder):
    return [flat_record(attempt) for attempt in read_trajectories(folder / "trajectories.jsonl")]


def steps_of(folder):
    """The train steps whose rows stand in the metrics, in their order."""
    path = folder / "metrics.jsonl"
    return [row["step"] for row in read_records(path) if "policy/loss" in row] if path.exists() else []


def wait_for_train_step(job, step):
    deadline = time.monotonic() + WAIT_S
    while step not in steps_of(job.folder):
        assert job.process.poll() is None, job.log.read_text()[-4000:]
        assert time.monotonic() < deadline, job.log.read_text()[-4000:]
        time.sleep(0.1)
