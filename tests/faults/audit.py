"""What a run's folder says of it: whether anything was lost or came twice, and what is not as in its twin."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learner.checkpoint import newest_checkpoint, read_manifest
from ray_jobs.run.folder import METRICS
from rollout.records import read_records
from rollout.store.adapters import AdapterStore
from rollout.store.ledger import Ledger

WEIGHTS = ("adapter.safetensors", "optimizer.pt")
_OF_THE_STEP = ("policy/", "learner/")
"""What a train step makes of its batch. Of groups that ended without signal a row tells with the batch that is cut
next, and after a cut-off that may be an earlier one: only their sums are the same."""


def audit(folder: Path, *, num_poisoned: int = 0) -> dict[str, Any]:
    """`sound` where nothing is lost or double, and no group failed but so many that were made to."""
    ledger = Ledger(folder / "ledger.sqlite")
    counts = ledger.verify()
    tasks = Counter(ledger.trained_tasks())
    steps = [row["step"] for row in read_records(folder / METRICS) if "policy/loss" in row]
    group_steps = {
        (row["group_id"], row["step"]) for row in read_records(folder / "trajectories.jsonl") if row["phase"] == "train"
    }
    index = list(read_records(folder / "adapters" / "index.jsonl"))
    versions = [row["policy_version"] for row in index]
    checks = {
        "balanced": counts.balanced,
        "no_task_trained_twice": max(tasks.values(), default=1) == 1,
        "no_group_logged_in_two_steps": len({group for group, _ in group_steps}) == len(group_steps),
        "every_step_once": steps == list(range(1, len(steps) + 1)),
        "no_version_reused": versions == sorted(set(versions)),
        "nothing_failed": counts.failed <= num_poisoned,
    }
    return {
        "ledger": {**asdict(counts), "filtered": counts.filtered, "live": counts.outstanding},
        "requeued": ledger.num_requeued(),
        "steps": len(steps),
        "versions_published": AdapterStore(folder / "adapters").num_published,
        "adapter": _newest_adapter(folder / "checkpoints"),
        "checks": checks,
        "sound": all(checks.values()),
    }


def _newest_adapter(checkpoints: Path) -> str | None:
    """The digest of the weights that the run ended with. At depth 0 it does not depend on what was killed."""
    checkpoint, _ = newest_checkpoint(checkpoints)
    return str(read_manifest(checkpoint.folder)["files"]["adapter.safetensors"]) if checkpoint else None


def differences(run: Path, twin: Path) -> list[str]:
    """What of a synchronous run that was disturbed is not as in its twin, which was left in peace, in words: weights,
    optimizer, each step's metrics, where the groups are and what they brought, but for times. Empty where they ended
    alike, to the last bit."""
    found, wanted = dict(_end_of(run)), dict(_end_of(twin))
    return [
        f"{what} is {found.get(what)}, and {wanted.get(what)} in the twin"
        for what in sorted({*found, *wanted})
        if found.get(what) != wanted.get(what)
    ]


def _end_of(folder: Path) -> Iterator[tuple[str, Any]]:
    checkpoint, _ = newest_checkpoint(folder / "checkpoints")
    manifest: dict[str, Any] = read_manifest(checkpoint.folder) if checkpoint else {"step": 0, "files": {}}
    yield "the step of the newest checkpoint", manifest["step"]
    for name in WEIGHTS:
        yield name, manifest["files"].get(name)
    ledger = Ledger(folder / "ledger.sqlite")
    for name, num in (asdict(ledger.verify()) | ledger.reported()).items():
        if not name.endswith("_s"):
            yield f"the sum of {name}", num
    for row in read_records(folder / METRICS):
        for name, value in row.items():
            if name.startswith(_OF_THE_STEP) and not name.endswith("_s"):
                yield f"step {row['step']}, {name}", value
