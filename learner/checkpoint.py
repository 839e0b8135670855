"""Checkpoints: a folder with a manifest of hashes that appears whole or not at all."""

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import UserError, reason
from learner.types import Adapter
from rollout.store.disk import sweep_partials, whole_folder
from rollout.store.lifecycle import NOTHING_TRAINED, TrainedGroups, TrainedStep

if TYPE_CHECKING:
    # Torch takes seconds to import, and whoever only looks for a checkpoint needs none of it.
    from learner.learner import Learner

MANIFEST = "manifest.json"
TRAINED = "trained.json"
_SET_ASIDE = "unusable-"
SCHEMA = 2


class CheckpointError(UserError):
    """A checkpoint that cannot be trusted; the message says which file and why."""


def save_checkpoint(learner: "Learner", parent: Path, *, keep: int, trained: TrainedGroups = NOTHING_TRAINED) -> Path:
    """Write adapter, optimizer and random state of the current version below `parent`, with what they were `trained`
    on, atomically. Of several ranks, which all call this, one writes; its files are those of a learner in one process.

    The manifest is written last, the folder renamed after everything is on disk, as a power cut would leave it. Older
    checkpoints beyond `keep` are deleted only then. Raises CheckpointError when the disk is full or not writable.
    """
    import torch

    adapter, optimizer = learner.adapter(), learner.optimizer.state_dict()
    target = parent / f"v{adapter.policy_version:06d}"
    if not learner.writes:
        return target
    try:
        sweep_partials(parent)
        with whole_folder(target) as partial:
            (partial / "adapter.safetensors").write_bytes(adapter.data)
            (partial / TRAINED).write_text(json.dumps(asdict(trained)))
            torch.save({"optimizer": optimizer, "torch_rng": torch.get_rng_state()}, partial / "optimizer.pt")
            write_manifest(partial, policy_version=adapter.policy_version, step=learner.num_steps_done)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot write checkpoint {target}: {_disk_fault(error)}; free space or change output_dir"
        ) from error
    for old in sorted(parent.glob("v*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_checkpoint(learner: "Learner", folder: Path) -> None:
    """Restore what `save_checkpoint` wrote. Raises CheckpointError unless every file matches its hash."""
    import torch

    manifest = read_manifest(folder)
    data = (folder / "adapter.safetensors").read_bytes()
    learner.load_adapter(
        Adapter(
            policy_version=manifest["policy_version"],
            data=data,
            digest=manifest["files"]["adapter.safetensors"],
        )
    )
    state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.num_steps_done = manifest["step"]
    torch.set_rng_state(state["torch_rng"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files all match its manifest, after so many optimizer steps."""

    folder: Path
    step: int

    def trained(self) -> TrainedGroups:
        """What its weights were trained on. Raises CheckpointError."""
        try:
            said = json.loads((self.folder / TRAINED).read_text())
        except OSError as error:
            raise CheckpointError(f"{self.folder} is not a complete checkpoint: {reason(error)}") from error
        steps = [
            TrainedStep(
                step=one["step"],
                groups=tuple((ordinal, task) for ordinal, task in one["groups"]),
                refused=one["refused"],
            )
            for one in said["steps"]
        ]
        return TrainedGroups(next_task=said["next_task"], steps=tuple(steps))


def newest_checkpoint(parent: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint below `parent` that can be trusted, None where there is none; and what is wrong with newer
    ones, which are left where they are."""
    checkpoint, unusable = _search(parent)
    return checkpoint, list(unusable.values())


def continue_from_newest(parent: Path) -> tuple[Checkpoint | None, list[str]]:
    """As `newest_checkpoint`, for the one process that goes on from there: it renames the newer ones, so that they
    neither count among those that are kept nor hide what is missing."""
    checkpoint, unusable = _search(parent)
    for folder in unusable:
        shutil.rmtree(folder.with_name(_SET_ASIDE + folder.name), ignore_errors=True)
        with suppress(OSError):
            folder.rename(folder.with_name(_SET_ASIDE + folder.name))
    return checkpoint, list(unusable.values())


def _search(parent: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    unusable: dict[Path, str] = {}
    for folder in sorted(parent.glob("v*"), reverse=True):
        try:
            return Checkpoint(folder=folder, step=read_manifest(folder)["step"]), unusable
        except CheckpointError as error:
            unusable[folder] = str(error)
        except KeyError as missing:
            unusable[folder] = f"{folder} is not a planner's checkpoint: its {MANIFEST} has no {missing}"
    return None, unusable


def oldest_kept_step(parent: Path) -> int:
    """The optimizer steps behind the oldest checkpoint that is left; 0 where there is none. One whose manifest cannot
    be read is of no use, and of no harm."""
    steps = []
    for folder in parent.glob("v*"):
        with suppress(OSError, ValueError, KeyError):
            steps.append(json.loads((folder / MANIFEST).read_text())["step"])
    return min(steps, default=0)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files all match it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, digest in manifest["files"].items():
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            if found != digest:
                raise CheckpointError(
                    f"{folder / name}: sha256 {found[:12]}, the manifest says {digest[:12]}; use an older checkpoint"
                )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {reason(error)}") from error
    return dict(manifest)


def write_manifest(folder: Path, **facts: object) -> None:
    """The hash of every file in `folder`, and the facts given."""
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"schema": SCHEMA, **facts, "files": files}, indent=2))


def _disk_fault(error: Exception) -> str:
    """torch says of a full disk only that it wrote less than it meant to."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"the disk does not take all of it ({reason(error)[:100]})"
