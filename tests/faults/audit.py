"""Checks of a run folder for lost or repeated work, and its comparison with another run."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from learner.checkpoint import newest_checkpoint, read_manifest
from ray_jobs.run.folder import METRICS
from rollout.files import read_json, read_records

WEIGHTS = ("adapter.safetensors", "optimizer.pt")
OF_THE_STEP = ("policy/", "learner/")
"""Metrics of a train step that depend on its batch alone."""
ENDS = ("trained", "refused", "filtered", "failed", "expired", "lost", "live_at_end")


def steps_of(folder: Path) -> list[int]:
    """Return the train steps whose rows stand in the metrics, in their order."""
    path = folder / METRICS
    return [row["step"] for row in read_records(path) if "policy/loss" in row] if path.exists() else []


def faults_of(folder: Path, groups: Mapping[str, int] | None = None) -> list[str]:
    """Return what is wrong with a finished run: the law of counts, and work that happened twice.

    `groups` are the counts of its groups, by default those in its summary.
    """
    groups = groups or read_json(folder / "summary.json")["groups"]
    rows = list(read_records(folder / "groups.jsonl"))
    steps = steps_of(folder)
    checks = {
        f"the counts do not add up: {groups}": groups["drawn"] == sum(groups[name] for name in ENDS),
        "a group has two ends": max(Counter(row["id"] for row in rows).values(), default=1) == 1,
        "a step is missing or repeated": steps == list(range(1, len(steps) + 1)),
        "groups.jsonl lacks trained groups": sum(row["state"] == "trained" for row in rows) == groups["trained"],
    }
    return [what for what, holds in checks.items() if not holds]


def differences(run: Path, other: Path) -> list[str]:
    """Return in what two runs at depth 0 differ, apart from times: weights, optimizer, and the metrics of each step."""
    found, wanted = dict(_end_of(run)), dict(_end_of(other))
    return [
        f"{what} is {found.get(what)}, and {wanted.get(what)} in the other run"
        for what in sorted({*found, *wanted})
        if found.get(what) != wanted.get(what)
    ]


def _end_of(folder: Path) -> Iterator[tuple[str, Any]]:
    checkpoint, _ = newest_checkpoint(folder / "checkpoints")
    manifest: dict[str, Any] = read_manifest(checkpoint.folder) if checkpoint else {"step": 0, "files": {}}
    yield "the step of the newest checkpoint", manifest["step"]
    for name in WEIGHTS:
        yield name, manifest["files"].get(name)
    for row in read_records(folder / METRICS):
        for name, value in row.items():
            if name.startswith(OF_THE_STEP) and not name.endswith("_s"):
                yield f"step {row['step']}, {name}", value
