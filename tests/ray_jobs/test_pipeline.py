"""The pipeline for real, small: collect, label, train a PRM, reinforce with it, evaluate; and its resumption."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SMALL = (
    "num_steps=1",
    "batch_groups=1",
    "max_empty_batches=60",
    "rollout.temperature=1.0",
    "cold_start.num_demonstrations=120",
    "cold_start.wrong_share=0.5",
    "collect.num_tasks=12",
    "collect.rollouts_per_task=4",
    "label.check_share=0.1",
    "label.continuations=2",
    "prm.num_epochs=1",
    "prm.num_layers=4",
    "evaluation.num_tasks=6",
    "evaluation.num_untouched_tasks=0",
)


def pipeline(folder):
    command = [
        sys.executable,
        "-m",
        "ray_jobs.cli",
        "pipeline",
        "configs/recipes/demo_cpu.toml",
        f"output_dir={folder}",
    ]
    done = subprocess.run([*command, *SMALL], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def read(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that ended after labelling, as far as its folder says, and was then continued."""
    folder = tmp_path_factory.mktemp("runs")
    pipeline(folder)
    path = folder / "demo"
    first = {name: (path / name).read_bytes() for name in ("labels.jsonl", "collected/shard-00000.jsonl")}
    phases = read(path / "phases.json")
    late = ("train_prm", "reinforce", "eval_after")
    (path / "phases.json").write_text(json.dumps({name: phases[name] for name in phases if name not in late}))
    (path / "summary.json").unlink()
    return path, first, pipeline(folder)


def test_all_phases_ran_and_the_summary_says_how_long_each_took(run):
    path, _, _ = run
    phases = read(path / "summary.json")["phases"]
    assert {"collect", "label", "train_prm", "reinforce", "eval_after"} <= set(phases)
    assert all(seconds >= 0 for seconds in phases.values())


def test_resumed_pipeline_does_not_collect_or_label_again(run):
    path, first, said = run
    assert {name: (path / name).read_bytes() for name in first} == first
    assert "collect trajectories to label ..." not in said
    assert "train the process reward model ..." in said


def test_a_step_of_an_rl_phase_that_began_twice_stands_in_the_metrics_once(run):
    path, _, _ = run
    steps = [row["step"] for row in map(json.loads, (path / "metrics.jsonl").open()) if "policy/loss" in row]
    assert steps == [1]


def test_quality_of_the_prm_is_in_the_summary_with_intervals(run):
    prm = read(run[0] / "summary.json")["prm"]
    for name in ("spearman_within_group", "auroc_outcome", "r2_over_constant", "mse"):
        assert f"{name}_ci95" in prm
    assert prm["num_tasks_held_out"] == 3
    assert prm["canaries"]
    assert prm["invariances"]["own_result"] == 0


def test_trained_groups_carry_raw_prm_scores_with_the_prms_digest(run):
    path = run[0]
    digest = read(path / "prm" / "manifest.json")["files"]["prm.safetensors"]
    rows = [row for row in map(json.loads, (path / "trajectories.jsonl").open()) if row["phase"] == "train"]
    assert rows
    for row in rows:
        planner = [turn for turn in row["turns"] if turn["role"] == "planner"]
        assert len(row["prm_scores"]) == len(planner)
        assert row["prm_digest"] == digest
        assert all(0 <= score <= 1 for score in row["prm_scores"])


def test_finished_pipeline_says_so_at_once(run):
    assert "report:" in pipeline(run[0].parent)
