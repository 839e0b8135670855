"""Checkpoints: a folder with a manifest of hashes that appears whole or not at all."""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.wording import reason
from learner.learner import Learner
from learner.types import Adapter

MANIFEST = "manifest.json"
SCHEMA = 2


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be trusted; the message says which file and why."""


def save_checkpoint(learner: Learner, parent: Path, *, keep: int) -> Path:
    """Write adapter, optimizer and random state of the current version below `parent`, atomically. Of several ranks,
    which all call this, one writes; its files are those of a learner in one process.

    The manifest is written last, the folder renamed after everything is on disk. Older checkpoints beyond
    `keep` are deleted only then. Raises CheckpointError when the disk is full or not writable.
    """
    adapter, optimizer = learner.adapter(), learner.optimizer.state_dict()
    target = parent / f"v{adapter.policy_version:06d}"
    if not learner.writes:
        return target
    partial = parent / f".{target.name}.{os.getpid()}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "adapter.safetensors").write_bytes(adapter.data)
        state = {"optimizer": optimizer, "torch_rng": torch.get_rng_state()}
        torch.save(state, partial / "optimizer.pt")
        write_manifest(partial, policy_version=adapter.policy_version, step=learner.num_steps_done)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {target}: {error.strerror}; free space or change output_dir"
        ) from error
    for old in sorted(parent.glob("v*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_checkpoint(learner: Learner, folder: Path) -> None:
    """Restore what `save_checkpoint` wrote. Raises CheckpointError unless every file matches its hash."""
    manifest = read_manifest(folder)
    data = (folder / "adapter.safetensors").read_bytes()
    learner.load_adapter(
        Adapter(
            policy_version=manifest["policy_version"],
            data=data,
            digest=manifest["files"]["adapter.safetensors"],
        )
    )
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.num_steps_done = manifest["step"]
    torch.set_rng_state(state["torch_rng"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files all match its manifest, after so many optimizer steps."""

    folder: Path
    step: int


def newest_checkpoint(parent: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint below `parent` that can be trusted, None where there is none; and what is wrong with newer
    ones, which are left where they are."""
    faults: list[str] = []
    for folder in sorted(parent.glob("v*"), reverse=True):
        try:
            return Checkpoint(folder=folder, step=read_manifest(folder)["step"]), faults
        except CheckpointError as error:
            faults.append(str(error))
        except KeyError as missing:
            faults.append(f"{folder} is not a planner's checkpoint: its {MANIFEST} has no {missing}")
    return None, faults


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


def write_manifest(folder: Path, **facts: Any) -> None:
    """The hash of every file in `folder`, and the facts given; synced to disk."""
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    with (folder / MANIFEST).open("w") as stream:
        json.dump({"schema": SCHEMA, **facts, "files": files}, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
