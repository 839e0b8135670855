"""Which checkpoint a person means: a run folder names its newest one."""

from pathlib import Path

from learner.checkpoint import MANIFEST, CheckpointError, newest_checkpoint


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a run folder (the newest good one), a checkpoint or the adapter file in it names. Raises
    CheckpointError."""
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise CheckpointError(f"'{path}' is no folder; name a run, a checkpoint in it, or `none`")
    if (folder / "config.json").is_file():
        return _newest(folder)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"'{folder}' is neither a run (it has no config.json) nor a checkpoint (it has no {MANIFEST}); name a run, "
            "a checkpoint in it, or `none`"
        )
    return folder


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in."""
    run = checkpoint.resolve().parent.parent
    return run if (run / "config.json").is_file() else None


def _newest(run: Path) -> Path:
    faults: list[str] = []
    for parent in ("checkpoints", "cold_start"):
        found, wrong = newest_checkpoint(run / parent)
        faults += wrong
        if found is not None:
            return found.folder
    raise CheckpointError(f"the run '{run}' has no checkpoint that can be used" + (f": {faults[0]}" if faults else ""))
