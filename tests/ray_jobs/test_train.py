"""The main job for real: Ray, vLLM and the demo model, small and synchronous."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of one recipe with one seed."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("first", "second"):
        command = [sys.executable, "-m", "ray_jobs.cli", "train", "configs/recipes/sync_cpu.toml"]
        done = subprocess.run(
            [*command, f"name={name}", f"output_dir={folder}"], cwd=ROOT, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def read(path):
    return json.loads(path.read_text())


def test_two_synchronous_runs_with_one_seed_end_with_identical_adapters(runs):
    manifests = [read(runs / name / "checkpoints" / "v000002" / "manifest.json") for name in ("first", "second")]
    digests = [manifest["files"]["adapter.safetensors"] for manifest in manifests]
    assert digests[0] == digests[1]


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
    assert summary["versions_published"] == summary["versions_acked"] == 3
    groups = summary["groups"]
    assert groups["drawn"] == groups["trained"] + groups["filtered"] + groups["failed"] + groups["live_at_end"]
    assert groups["trained"] == 4


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
