"""Checkpoints: a folder with a manifest of hashes that appears whole or not at all."""

import json
import re
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from configs.errors import UserError, reason
from learner.types import Adapter
from rollout.files import file_digest, file_digests, sweep_partials, whole_folder
from rollout.lifecycle import Snapshot

if TYPE_CHECKING:
    from learner.learner import Learner

MANIFEST = "manifest.json"
SNAPSHOT = "groups.json"
_SET_ASIDE = "unusable-"
NO_GROUPS = Snapshot()


def save_checkpoint(learner: "Learner", parent: Path, *, keep: int, snapshot: Snapshot = NO_GROUPS) -> Path:
    """Write adapter, optimizer, torch's random state and a manifest of the current version below `parent`, atomically.

    `snapshot` is the state of the buffer after the step that made these weights. All ranks call this, and one writes.
    Older checkpoints beyond `keep` are deleted at the end. Raises UserError when the disk is full or not writable.
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
            (partial / SNAPSHOT).write_bytes(msgspec.json.encode(snapshot))
            state = {"optimizer": optimizer, "torch_rng": torch.get_rng_state()}
            torch.save(state, partial / "optimizer.pt")
            write_manifest(partial, policy_version=adapter.policy_version, step=learner.num_steps_done)
    except (OSError, RuntimeError) as error:
        # Torch reports a full disk only as a short write.
        problem = f"cannot write checkpoint {target}: {reason(error)[:100]}; free space, and continue with"
        raise UserError(f"{problem} `agentflow resume {shlex.quote(str(parent.parent))}`") from error
    saved = checkpoints_in(parent)
    for old in saved[: max(0, saved.index(target) + 1 - keep)]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def checkpoints_in(parent: Path) -> list[Path]:
    """Return the folders below `parent` that are named as checkpoints, by version. Others are the user's."""
    named = (path for path in parent.glob("v*") if re.fullmatch("v[0-9]+", path.name) and path.is_dir())
    return sorted(named, key=lambda path: int(path.name[1:]))


def load_checkpoint(learner: "Learner", folder: Path) -> None:
    """Restore what `save_checkpoint` wrote. Raises UserError unless every file matches its hash."""
    import torch

    manifest = read_manifest(folder)
    data = (folder / "adapter.safetensors").read_bytes()
    digest = manifest["files"]["adapter.safetensors"]
    learner.load_adapter(Adapter(policy_version=manifest["policy_version"], data=data, digest=digest))
    state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.num_steps_done = manifest["step"]
    torch.set_rng_state(state["torch_rng"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files all match its manifest."""

    folder: Path
    step: int
    """Optimizer steps behind its weights."""

    def snapshot(self) -> Snapshot:
        """Return the state of the buffer that belongs to the weights."""
        return msgspec.json.decode((self.folder / SNAPSHOT).read_bytes(), type=Snapshot)


def newest_checkpoint(parent: Path, *, set_aside: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint below `parent`, or None, and what is wrong with newer ones.

    With `set_aside`, for the process that continues the run, the newer ones are renamed.
    """
    faults: list[str] = []
    for folder in reversed(checkpoints_in(parent)):
        try:
            return Checkpoint(folder=folder, step=read_manifest(folder)["step"]), faults
        except UserError as error:
            faults.append(str(error))
        if set_aside:
            shutil.rmtree(folder.with_name(_SET_ASIDE + folder.name), ignore_errors=True)
            with suppress(OSError):
                folder.rename(folder.with_name(_SET_ASIDE + folder.name))
    return None, faults


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files all match it. Raises UserError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, digest in manifest["files"].items():
            if (found := file_digest(folder / name)) != digest:
                raise UserError(
                    f"{folder / name}: sha256 {found[:12]}, the manifest says {digest[:12]}; use an older checkpoint"
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder} is not a complete checkpoint: {reason(error)}") from error
    return dict(manifest)


def write_manifest(folder: Path, **facts: object) -> None:
    """Write the hash of every file in `folder`, and these facts."""
    manifest = {**facts, "files": file_digests(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))
