"""Runs that continue from the same cold start, for benchmarks that compare them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.loading import load_run_config
from configs.run import RunConfig
from ray_jobs.evaluation import evaluation_in
from ray_jobs.statistics import PairedComparison, compare_paired

WRITTEN_BY_RL = ("config.json", "tb", "checkpoints", "groups.jsonl", "summary.json")
WRITTEN_AFTER_RL = ("report.html", ".lock")


def agentflow(*arguments: str) -> None:
    """Run a command of `agentflow`; raise CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "ray_jobs.cli", *arguments], check=True)


def train(recipe: Path, folder: Path, overrides: Sequence[str], *, start_from: Path | None = None) -> None:
    """Train the recipe in `folder` unless it is done there, or resume it.

    With `start_from` the run continues from a copy of that run as it was before its RL phase, under its own config.
    """
    if (folder / "summary.json").exists():
        return
    overrides = [f"name={folder.name}", f"output_dir={folder.parent}", *overrides]
    if (folder / "config.json").exists():
        agentflow("resume", str(folder))
    elif start_from is None:
        agentflow("train", str(recipe), *overrides)
    else:
        copy_before_rl(start_from, folder, load_run_config(recipe, overrides))
        agentflow("resume", str(folder))


def copy_before_rl(run: Path, folder: Path, config: RunConfig) -> None:
    """Copy the run's cold start, PRM and first evaluation, with another config."""
    shutil.rmtree(folder, ignore_errors=True)
    left = {*WRITTEN_BY_RL, *WRITTEN_AFTER_RL}
    # Only of the run's own folder: collected attempts are in a `groups.jsonl`, too.
    shutil.copytree(run, folder, ignore=lambda place, _: left if Path(place) == run else ())
    phases = json.loads((folder / "phases.json").read_text())
    kept = {name: phase for name, phase in phases.items() if name not in ("reinforce", "eval_after")}
    (folder / "phases.json").write_text(json.dumps(kept))
    (folder / "config.json").write_text(config.model_dump_json())
    origin = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps(origin | {"with_prm": config.trains_prm}))


def train_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics rows of a run's train steps."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row for row in rows if "policy/loss" in row]


def compare_after_rl(before: Sequence[Path], after: Sequence[Path]) -> PairedComparison:
    """Compare two lists of runs on the held-out tasks that both runs of a pair could score."""
    pairs: list[tuple[float, float]] = []
    for one, other in zip(before, after, strict=True):
        pairs += evaluation_in(one, "eval_after").paired_with(evaluation_in(other, "eval_after"))
    return compare_paired([one for one, _ in pairs], [other for _, other in pairs])
