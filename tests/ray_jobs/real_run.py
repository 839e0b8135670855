"""Helpers that read the folder of a real run, also while its job runs."""

import json
import time

from rollout.codec import flat_record, read_trajectories
from tests.faults.audit import steps_of

WAIT_S = 900


def read(path):
    return json.loads(path.read_text())


def attempts_of(folder):
    return [flat_record(attempt) for attempt in read_trajectories(folder / "trajectories.jsonl")]


def wait_for_train_step(job, step):
    deadline = time.monotonic() + WAIT_S
    while step not in steps_of(job.folder):
        assert job.process.poll() is None, job.log.read_text()[-4000:]
        assert time.monotonic() < deadline, job.log.read_text()[-4000:]
        time.sleep(0.1)
