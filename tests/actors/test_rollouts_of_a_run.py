"""A rollout worker is killed outside of the RL loop: it is replaced, and costs only what it had open."""

from functools import partial

import pytest
from faults import DyingInAttemptWorker, events
from stage import local_ray, make_config, open_stage

from envs.datasets.sampler import evaluation_tasks
from ray_jobs.held_out import evaluate
from rollout.records import read_records

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


def test_evaluation_in_which_a_worker_dies_goes_on_with_another_that_has_the_newest_weights(tmp_path):
    config = make_config(tmp_path, "evaluation.num_tasks=8", "rollout.engine.max_num_seqs=1")
    build_worker = partial(DyingInAttemptWorker, folder=tmp_path)
    with open_stage(config, build_worker=build_worker) as stage:
        evaluate(stage.run, "eval_before")
        newest = stage.run.actors.newest_version()
    rows = [row for row in read_records(stage.folder / "trajectories.jsonl") if row["phase"] == "eval_before"]
    assert [row["task_id"] for row in rows] == [task.id for task in evaluation_tasks(config)]
    assert {row["attempts"] for row in rows} == {1}
    attempts = events(tmp_path, "attempt")
    assert len({one["pid"] for one in attempts}) == 2
    assert {one["version"] for one in attempts} == {newest}
    # Two were open when it died, and only they were asked again.
    assert len(attempts) <= 8 + 2
    assert "the rollout worker 0 was lost and is replaced" in stage.said
