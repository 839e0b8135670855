"""A synchronous run that was disturbed ends with what its twin ended with, which was left in peace, to the last bit."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learner.checkpoint import newest_checkpoint, read_manifest
from ray_jobs.run.folder import METRICS
from rollout.records import read_records
from rollout.store.ledger import Ledger

WEIGHTS = ("adapter.safetensors", "optimizer.pt")
_OF_THE_STEP = ("policy/", "learner/")
"""What a train step makes of its batch. Of groups that ended without signal a row tells with the batch that is cut
next, and after a cut-off that may be an earlier one: only their sums are the same."""


def differences(run: Path, twin: Path) -> list[str]:
    """What of a run is not as in its twin, in words: weights, optimizer, each step's metrics, where the groups are and
    what they brought, but for times. Empty where they ended alike."""
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
