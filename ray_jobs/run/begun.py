"""A run that was started before: its configuration, its place, and its checkpoints."""

import json
import sys
from pathlib import Path
from typing import Any

from configs.errors import UserError, reason
from configs.plugins import search_in
from configs.run import RunConfig
from learner.checkpoint import MANIFEST, newest_checkpoint, read_manifest
from ray_jobs.run.model_folder import same_weights
from ray_jobs.run.preflight import check_same_run
from rollout.records import read_json


class RunFolderError(UserError):
    """A file of the run could not be read or written; the message says which one, why and what to do."""


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a run folder (the newest good one), a checkpoint or the adapter file in it names. Raises
    UserError."""
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise UserError(f"'{path}' is no folder; name a run, a checkpoint in it, or `none`")
    if (folder / "config.json").is_file():
        return _newest(folder)
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"'{folder}' is neither a run (it has no config.json) nor a checkpoint (it has no {MANIFEST}); name a run, "
            "a checkpoint in it, or `none`"
        )
    if "policy_version" not in read_manifest(folder):
        raise UserError(f"'{folder}' is no checkpoint of a planner; name a run, or one below its checkpoints/")
    return folder


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, as the checkpoint is named, or where a link leads."""
    places = (checkpoint.absolute().parent.parent, checkpoint.resolve().parent.parent)
    return next((run for run in places if (run / "config.json").is_file()), None)


def _newest(run: Path) -> Path:
    """Return the newest usable checkpoint of a run; unusable ones are reported on stderr."""
    faults: list[str] = []
    for parent in ("checkpoints", "cold_start"):
        found, wrong = newest_checkpoint(run / parent)
        faults += wrong
        if found is not None:
            for fault in faults:
                print(f"agentflow: passed over a checkpoint: {fault}", file=sys.stderr)
            return found.folder
    raise UserError(f"the run '{run}' has no checkpoint that can be used" + (f": {faults[0]}" if faults else ""))


def begun_config(path: Path) -> RunConfig:
    """Configuration of the run in this folder, whose own code is found from now on. A run that was moved writes where
    it is now, and one that was started elsewhere is named by its whole path. Raises RunFolderError."""
    config, here, home = _written_config(path), path.resolve(), started_in(path)
    search_in(str(home / (config.code_path or "")))
    search_in(str(home))
    if config.run_path.resolve() == here:
        return config
    return config.model_copy(update={"output_dir": str(here.parent), "name": here.name})


def origin_of(path: Path) -> dict[str, Any]:
    """What the run in this folder wrote down of its beginning. Raises RunFolderError."""
    try:
        return dict(json.loads((path / "provenance.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise _no_run(path, error) from error


def check_trained_alike(checkpoint: Path, config: RunConfig, model_path: Path) -> None:
    """Whether a checkpoint is to be used by the kind of agent, with the scale and on the base that its run had;
    `model_path` is the folder of `model.path`. Of one that lies in no run nobody knows. Raises UserError and
    RunFolderError."""
    run = run_of(checkpoint)
    if run is None:
        return
    begun, model = _written_config(run), config.model
    if (begun.agent.type == "planner") != (config.agent.type == "planner"):
        raise UserError(
            f"the adapter in {checkpoint} was trained with agent.type = '{begun.agent.type}', and this recipe has "
            f"'{config.agent.type}', which asks otherwise; give the recipe of its run, {run}/config.json"
        )
    trained = begun.model
    if trained.lora_alpha != model.lora_alpha:
        raise UserError(
            f"the adapter in {checkpoint} was trained with model.lora_alpha = {trained.lora_alpha}, and with "
            f"{model.lora_alpha} it would count {model.lora_alpha / trained.lora_alpha:g} times; set "
            f"model.lora_alpha={trained.lora_alpha}, or give the recipe of the run that trained it"
        )
    folder = started_in(run) / Path(trained.path).expanduser()
    local = trained.path != "demo" and folder.is_dir()
    if not (same_weights(folder, model_path) if local else trained.path == model.path):
        base = folder if local else trained.path
        raise UserError(
            f"the adapter in {checkpoint} was trained on model.path = '{base}', and model.path = '{model.path}' is not "
            f"known to have the same weights; set model.path={base}, or, if they are the same, copy the checkpoint out "
            "of its run"
        )


def trains_prm(config: RunConfig) -> bool:
    """Whether the run trains a PRM of its own: one that has begun goes on as it began. Raises PreflightError for the
    run of another recipe, and RunFolderError."""
    path = config.run_path
    if not (path / "config.json").exists():
        return config.trains_prm
    check_same_run(config, path)
    try:
        return bool(origin_of(path)["with_prm"])
    except KeyError as error:
        raise _no_run(path, error) from error


def started_in(path: Path) -> Path:
    """The folder that the run in `path` was started in, which its relative paths start from: as far up as its own
    relative output_dir goes down. The current one, where that does not tell. Raises RunFolderError."""
    written = _written_config(path).run_path
    if written.is_absolute() or written.resolve() == path.resolve():
        return Path.cwd()
    depth = len(written.parts)
    # As it was named first: `runs` may be a link to another disk.
    for here in (path.absolute(), path.resolve()):
        if here.parts[-depth:] == written.parts:
            return here.parents[depth - 1]
    return Path.cwd()


def finished_summary(config: RunConfig) -> dict[str, Any] | None:
    """The summary of this very run where it ended already; None where there is something left to do."""
    path = config.run_path / "summary.json"
    if not path.exists():
        return None
    check_same_run(config, config.run_path)
    return read_json(path)


def _written_config(path: Path) -> RunConfig:
    """As it was when the run began."""
    try:
        return RunConfig.model_validate_json((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise _no_run(path, error) from error


def _no_run(path: Path, error: Exception) -> RunFolderError:
    return RunFolderError(f"'{path}' is not the folder of a run: {reason(error)}; give the folder below runs/")
