"""Relative paths of a recipe start from where the driver is, on every machine and in every process."""

import os
from pathlib import Path

from configs.run import RunConfig

_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for a submitted job, whose working directory travels: there a relative path of the data is right as it
stands, and another machine may keep its copy elsewhere."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The recipe for actors: their processes may have been started in another folder."""
    envs, reward = config.envs, config.reward
    reward = reward.model_copy(update={"prm_path": _absolute(reward.prm_path)})
    if _SUBMITTED not in os.environ:
        recording = envs.recording.model_copy(update={"path": _absolute(envs.recording.path)})
        envs = envs.model_copy(update={"data_path": _absolute(envs.data_path), "recording": recording})
    return config.model_copy(update={"output_dir": _absolute(config.output_dir), "envs": envs, "reward": reward})


def shown(path: Path) -> str:
    """As short as it can be said where the driver is."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _absolute(path: str | None) -> str | None:
    return path and str(Path(path).absolute())
