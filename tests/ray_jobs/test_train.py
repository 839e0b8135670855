"""The main job for real: Ray, vLLM and the demo model, small and synchronous."""

import json
import sys
import time
from pathlib import Path

import pytest

from ray_jobs.chaos import Job, audit
from rollout.records import read_records

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of one recipe with one seed; the second is killed with all that it started, and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("first", "second"):
        command = [sys.executable, "-m", "ray_jobs.cli", "train", "configs/recipes/sync_cpu.toml"]
        job = Job(
            start=[*command, f"name={name}", f"output_dir={folder}"], folder=folder / name, log=folder / f"{name}.log"
        )
        job.ensure_running()
        if name == "second":
            wait_for_train_step(job, 1)
            job.kill("driver", job.process.pid)
            job.ensure_running()
        assert job.process.wait(timeout=900) == 0, job.log.read_text()[-4000:]
    return folder


def wait_for_train_step(job, step):
    metrics, deadline = job.folder / "metrics.jsonl", time.monotonic() + 600
    while not metrics.exists() or step not in [row["step"] for row in read_records(metrics) if "policy/loss" in row]:
        assert job.process.poll() is None, job.log.read_text()[-4000:]
        assert time.monotonic() < deadline, job.log.read_text()[-4000:]
        time.sleep(0.1)


def read(path):
    return json.loads(path.read_text())


def newest_manifest(folder):
    return read(max((folder / "checkpoints").glob("v*")) / "manifest.json")


def test_a_synchronous_run_that_was_killed_and_resumed_ends_with_the_very_adapter_of_one_that_was_not(runs):
    whole, killed = (newest_manifest(runs / name) for name in ("first", "second"))
    assert whole["step"] == killed["step"] == 3
    assert whole["files"]["adapter.safetensors"] == killed["files"]["adapter.safetensors"]


def test_nothing_is_lost_or_double_after_a_kill_and_a_resume(runs):
    first, second = (audit(runs / name) for name in ("first", "second"))
    assert second["sound"], second["checks"]
    assert {**second["ledger"], "live": 0} == {**first["ledger"], "live": 0}


def test_summary_holds_what_a_reader_is_promised(runs):
    summary = read(runs / "first" / "summary.json")
    promised = (
        "solve_rate_before solve_rate_after num_eval_tasks solve_rate_gain_ci95 mcnemar_p wall_s train_wall_s "
        "num_steps num_trajectories trajectories_per_s rollout_tokens_per_s learner_tokens_per_s staleness groups "
        "versions_published versions_acked logprob_gap_version0"
    )
    assert set(promised.split()) <= set(summary)
    assert set(summary["staleness"]) == {"mean", "max"}


def test_every_published_version_was_acknowledged_and_every_group_is_accounted_for(runs):
    summary = read(runs / "first" / "summary.json")
    assert summary["versions_published"] == summary["versions_acked"] == 4
    groups = summary["groups"]
    ended = groups["trained"] + groups["filtered"] + groups["failed"] + groups["expired"]
    assert groups["drawn"] == ended + groups["live_at_end"]
    assert groups["trained"] == 6


def test_engine_and_learner_agree_on_log_probs_at_version_zero(runs):
    assert 0 < read(runs / "first" / "summary.json")["logprob_gap_version0"] < 0.02


def test_synchronous_run_is_never_stale(runs):
    assert read(runs / "first" / "summary.json")["staleness"]["max"] == 0


def test_run_folder_says_what_ran_and_where(runs):
    folder = runs / "first"
    assert read(folder / "config.json")["pipeline_depth"] == 0
    assert {"ray", "torch"} <= set(read(folder / "provenance.json")["versions"])
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert list((folder / "tb").iterdir())
    phases = {json.loads(line)["phase"] for line in (folder / "trajectories.jsonl").open()}
    assert {"eval_before", "train", "eval_after"} <= phases


def test_no_tokens_of_a_trajectory_were_tokenised_again(runs):
    for line in (runs / "first" / "trajectories.jsonl").open():
        for turn in json.loads(line)["turns"]:
            assert len(turn["token_ids"]) == len(turn["logprobs"])
