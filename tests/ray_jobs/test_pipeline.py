"""A run with a PRM for real, small: collect, label, train a PRM, reinforce, evaluate; killed on its way, resumed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_run import WAIT_S, attempts_of, read, steps_of, wait_for_train_step

from ray_jobs.run.metrics import BY_NAME
from rollout.records import read_records
from tests.faults.audit import faults_of
from tests.faults.job import Job

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SMALL = (
    "num_steps=2",
    "batch_groups=1",
    "max_empty_batches=60",
    "rollout.temperature=1.0",
    "rollout.engine.metrics=true",
    "learner.checkpoint_every=1",
    "cold_start.num_demonstrations=96",
    "cold_start.wrong_share=0.5",
    "collect.num_tasks=12",
    "collect.rollouts_per_task=4",
    "prm.num_epochs=1",
    "prm.num_layers=4",
    "evaluation.num_tasks=6",
    "evaluation.num_untouched_tasks=0",
    "evaluation.every_steps=1",
    "evaluation.while_training_tasks=2",
)


def command(folder):
    run = [sys.executable, "-m", "ray_jobs.cli", "train", "configs/recipes/prm_cpu.toml", f"output_dir={folder}"]
    return [*run, *SMALL]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A pipeline that was killed after its first train step, with all that it had started, and resumed; where its
    folder says that the PRM's training had not ended yet. With what was collected, labelled and learnt before."""
    folder = tmp_path_factory.mktemp("runs")
    job = Job(start=command(folder), folder=folder / "prm", log=folder / "prm.log")
    job.ensure_running()
    wait_for_train_step(job, 1)
    job.kill("driver", job.process.pid)
    before = {name: (job.folder / name).read_bytes() for name in ("labels.jsonl", "collected/shard-00000.jsonl")}
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


@pytest.fixture(scope="module")
def summary(run):
    return read(run / "summary.json")


def test_all_phases_ran_and_the_summary_says_how_long_each_took(summary):
    assert {"collect", "label", "train_prm", "reinforce", "eval_after"} <= set(summary["phases"])
    assert all(seconds >= 0 for seconds in summary["phases"].values())


def test_resumed_pipeline_does_not_collect_or_label_again_but_trains_the_prm_whose_training_had_not_ended(killed):
    job, before, _ = killed
    assert {name: (job.folder / name).read_bytes() for name in before} == before
    said = job.log.read_text()[job.logged_before :]
    assert "collect trajectories to label ..." not in said
    assert "train the process reward model ..." in said


def test_nothing_is_lost_or_double_after_a_kill_and_a_resume(run):
    assert faults_of(run) == []
    assert sorted(steps_of(run)) == [1, 2]


def test_every_group_that_was_drawn_has_its_account(summary):
    groups = summary["groups"]
    ended = groups["trained"] + groups["filtered"] + groups["failed"] + groups["expired"] + groups["lost"]
    assert groups["drawn"] == ended + groups["live_at_end"]
    assert groups["trained"] == 2


def test_a_kill_leaves_at_most_one_version_without_acknowledgement(summary):
    assert summary["versions_published"] - 1 <= summary["versions_acked"] <= summary["versions_published"]


def test_engine_and_learner_agree_on_log_probs_at_version_zero(summary):
    """Both compute in bf16, here at temperature 1 and hardly trained; over choice tokens, where rounding shows."""
    assert 0 < summary["logprob_gap_version0"] < 0.1


def test_summary_holds_what_a_reader_is_promised(summary):
    promised = (
        "solve_rate_before solve_rate_after num_eval_tasks solve_rate_gain_ci95 mcnemar_p wall_s train_wall_s "
        "num_steps num_trajectories trajectories_per_s rollout_tokens_per_s learner_tokens_per_s staleness groups "
        "versions_published versions_acked logprob_gap_version0"
    )
    assert set(promised.split()) <= set(summary)
    assert set(summary["staleness"]) == {"mean", "max"}


def test_quality_of_the_prm_is_in_the_summary_with_intervals(summary):
    prm = summary["prm"]
    for name in ("spearman_within_group", "auroc_outcome", "r2_over_constant", "mse"):
        assert f"{name}_ci95" in prm
    assert prm["num_tasks_held_out"] == 3
    assert prm["canaries"]
    assert prm["invariances"]["own_result"] == 0


def test_training_the_prm_anew_does_not_go_on_from_the_first_training(killed, run):
    """Which may round otherwise in another process."""
    (_, first), (_, second) = killed[2], prm_of(run)
    assert len(first) > 1
    assert second == pytest.approx(first, rel=0.01)
    assert second[-1] < 0.8 * second[0]


def test_trained_groups_carry_raw_prm_scores_with_the_digest_of_the_weights_that_gave_them(killed, run):
    (first, _), (second, _) = killed[2], prm_of(run)
    rows = [row for row in attempts_of(run) if row.get("verdict") == "trained"]
    assert {row["step"] for row in rows} == {1, 2}
    for row in rows:
        planner = [turn for turn in row["turns"] if turn["role"] == "planner"]
        assert len(row["prm_scores"]) == len(planner)
        assert row["prm_digest"] in (first, second)
        assert all(0 <= score <= 1 for score in row["prm_scores"])


def test_no_tokens_of_a_trajectory_were_tokenised_again(run):
    for row in attempts_of(run):
        for turn in row["turns"]:
            assert len(turn["token_ids"]) == len(turn["logprobs"])


def test_run_folder_says_what_ran_and_where(run):
    assert read(run / "config.json")["pipeline_depth"] == 2
    assert {"ray", "torch"} <= set(read(run / "provenance.json")["versions"])
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert list((run / "tb").iterdir())
    phases = {row["phase"] for row in attempts_of(run)}
    assert {"eval_before", "train", "held_out", "eval_after"} <= phases


def test_every_metric_is_in_the_table(run):
    rows = read_records(run / "metrics.jsonl")
    names = {name for row in rows for name in row} - {"step", "wall_s"}
    # Those of a data set end in its name.
    assert {"/".join(name.split("/")[:2]) for name in names} <= BY_NAME.keys()


def test_held_out_tasks_were_attempted_between_the_two_steps_once_and_with_one_version(run):
    (row,) = [row for row in read_records(run / "metrics.jsonl") if "held_out/unscored" in row]
    attempts = [row for row in attempts_of(run) if row["phase"] == "held_out"]
    assert (row["step"], len(attempts), {one["step"] for one in attempts}) == (1, 2, {1})
    assert {version for one in attempts for version in one["versions"] or ()} == {row["held_out/policy_version"]}


def test_finished_pipeline_says_so_at_once(run):
    done = subprocess.run(command(run.parent), cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "report:" in done.stdout
