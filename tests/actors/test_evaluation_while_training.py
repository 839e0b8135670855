"""Held-out tasks are attempted between two train steps: with one version, beside the rollouts, whoever dies."""

from functools import partial

import pytest
from faults import AttemptingWorker, DyingInAttemptWorker, events
from rollout.store.adapters import AdapterStore
from stage import check_nothing_lost, groups_of, local_ray, make_config, open_stage

from ray_jobs.held_out import tasks_while_training
from rollout.records import read_records

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

EVALUATED = ("evaluation.every_steps=1", "evaluation.num_tasks=8", "evaluation.while_training_tasks=4", "num_steps=3")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


def train(folder, worker, *overrides):
    """The stage of a run that has ended."""
    folder.mkdir()
    config = make_config(folder, *overrides)
    with open_stage(config, build_worker=partial(worker, folder=folder)) as stage:
        stage.finish(stage.reinforce())
    return stage


def held_out_rows(folder):
    return [row for row in read_records(folder / "metrics.jsonl") if "held_out/unscored" in row]


def check_evaluations(stage, folder):
    """One after each step but the last, of the same tasks, all of whose attempts were made with that step's version."""
    rows = held_out_rows(stage.folder)
    assert [row["step"] for row in rows] == [1, 2]
    versions = {f"held_out-{row['step']}": row["held_out/policy_version"] for row in rows}
    assert list(versions.values()) == [1, 2]
    assert all(one["version"] == versions[one["phase"]] for one in events(folder, "attempt"))
    asked = [task.id for task in tasks_while_training(stage.run.config)]
    written = [row for row in read_records(stage.folder / "trajectories.jsonl") if row["phase"] == "held_out"]
    assert [(row["step"], row["task_id"]) for row in written] == [(step, id) for step in (1, 2) for id in asked]


def test_worker_that_dies_over_it_is_replaced_and_rolls_out_again(tmp_path):
    folder = tmp_path / "dying"
    stage = train(folder, DyingInAttemptWorker, *EVALUATED, "rollout.engine.max_num_seqs=4")
    check_evaluations(stage, folder)
    check_nothing_lost(stage.folder)
    attempts = events(folder, "attempt")
    assert len({one["pid"] for one in attempts}) == 2
    assert len({one["pid"] for one in events(folder, "begin")}) == 2
    assert stage.said.count("the rollout worker 0 was lost and is replaced") == 1
    assert "after step 1: " in stage.said


def test_synchronous_run_trains_the_very_same_groups_and_none_of_them_is_rolled_out_meanwhile(tmp_path):
    folder = tmp_path / "evaluated"
    stage = train(folder, AttemptingWorker, *EVALUATED, "pipeline_depth=0")
    check_evaluations(stage, folder)
    other = train(tmp_path / "other", AttemptingWorker, "num_steps=3", "pipeline_depth=0")
    newest = [AdapterStore(one.folder / "adapters") for one in (stage, other)]
    assert newest[0].read(newest[0].newest) == newest[1].read(newest[1].newest)
    ledgers = [[tuple(row) for row in groups_of(one.folder)] for one in (stage, other)]
    assert ledgers[0] == ledgers[1]
    running = 0
    for one in events(folder):
        running += {"begin": 1, "end": -1}.get(one["kind"], 0)
        assert one["kind"] not in ("attempt", "attempted") or running == 0
