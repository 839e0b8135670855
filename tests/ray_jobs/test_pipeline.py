"""A run with a PRM for real, small: collect, label, train a PRM, reinforce, evaluate; killed on its way, resumed."""

import json
import sys

import pytest
from real_run import WAIT_S, attempts_of, read, wait_for_train_step

from rollout.files import read_records
from tests.faults.audit import faults_of, steps_of
from tests.faults.job import Job

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SMALL = (
    *("num_steps=2", "batch_groups=1", "max_empty_batches=60", "learner.checkpoint_every=1"),
    *("rollout.temperature=1.0", "rollout.engine.metrics=true", "prm.num_epochs=1", "prm.num_layers=4"),
    *("cold_start.num_demonstrations=96", "cold_start.lazy_share=0.5", "collect.num_tasks=12"),
    *("collect.rollouts_per_task=4", "evaluation.num_tasks=6", "evaluation.num_untouched_tasks=0"),
    "reward.credit=process",
)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A pipeline that was killed after its first train step, with all that it had started, and resumed; where its
    folder says that the PRM's training had not ended yet. With what was collected, labelled and learnt before."""
    folder = tmp_path_factory.mktemp("runs")
    start = [sys.executable, "-m", "ray_jobs.cli", "train", "configs/recipes/prm_cpu.toml", f"output_dir={folder}"]
    job = Job(start=[*start, *SMALL], folder=folder / "prm", log=folder / "prm.log")
    job.ensure_running()
    wait_for_train_step(job, 1)
    job.kill("driver", job.process.pid)
    before = {name: (job.folder / name).read_bytes() for name in ("labels.jsonl", "collected/groups.jsonl")}
    first = prm_of(job.folder)
    phases = read(job.folder / "phases.json")
    (job.folder / "phases.json").write_text(json.dumps({name: phases[name] for name in phases if name != "train_prm"}))
    job.ensure_running()
    assert job.process.wait(timeout=WAIT_S) == 0, job.log.read_text()[-4000:]
    return job, before, first


def prm_of(folder):
    """The digest of the PRM's weights, and the losses of its training."""
    losses = [row["train_prm/loss"] for row in read_records(folder / "metrics.jsonl") if "train_prm/loss" in row]
    return read(folder / "prm" / "manifest.json")["files"]["prm.safetensors"], losses


@pytest.fixture(scope="module")
def run(killed):
    return killed[0].folder


def test_resumed_pipeline_repeats_only_the_unfinished_phase(killed):
    job, before, _ = killed
    assert {name: (job.folder / name).read_bytes() for name in before} == before
    said = job.log.read_text()[job.logged_before :]
    assert "collect trajectories to label ..." not in said
    assert "train the process reward model ..." in said


def test_nothing_is_lost_or_duplicated_after_a_resume(run):
    assert faults_of(run) == []
    assert sorted(steps_of(run)) == [1, 2]


def test_summary_has_the_gap_of_log_probs_and_the_quality_of_the_prm_with_intervals(run):
    summary = read(run / "summary.json")
    # Engine and learner compute in bf16, here at temperature 1 and hardly trained; of choice tokens.
    assert 0 < summary["logprob_gap_version0"] < 0.1
    prm = summary["prm"]
    for name in ("spearman_within_group", "auroc_outcome", "auroc_step", "mse"):
        assert f"{name}_ci95" in prm
    assert prm["num_tasks_held_out"] == 3


def test_collected_attempts_include_the_plan_of_each_task(run):
    last = [group["trajectories"][-1] for group in read_records(run / "collected" / "groups.jsonl")]
    assert [(one["id"].partition("/teacher")[1], one["reward"]["outcome"]) for one in last] == [("/teacher", 1.0)] * 12


def test_repeated_prm_training_starts_from_the_base(killed, run):
    """Rounding may differ in another process. The losses themselves depend on what was sampled."""
    (_, first), (_, second) = killed[2], prm_of(run)
    assert len(first) > 1
    assert second == pytest.approx(first, rel=0.01)


def test_trained_groups_have_prm_scores_and_digest(killed, run):
    (first, _), (second, _) = killed[2], prm_of(run)
    rows = [row for row in attempts_of(run) if row.get("verdict") == "trained"]
    assert {row["step"] for row in rows} == {1, 2}
    for row in rows:
        planner = [turn for turn in row["turns"] if turn["role"] == "planner"]
        assert len(row["prm_scores"]) == len(planner)
        assert row["prm_digest"] in (first, second)
        assert all(0 <= score <= 1 for score in row["prm_scores"])
