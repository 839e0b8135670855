"""TRL in an environment of its own, with our versions of what both stand on, made at its first use; and its settings,
which are those of a recipe."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ray_jobs.run.resources import KEEP_MEMORY

from configs.learner import DapoConfig
from configs.run import RunConfig
from learner.demo_model import cache_dir
from ray_jobs.run.model_folder import resolve_model

TRL = "1.16.0"
_STARTED_WITH = dict(os.environ)
SAME_VERSIONS = ("torch", "transformers", "peft", "accelerate", "datasets", "numpy")


def trl_python() -> Path:
    """The interpreter of that environment. Ends the process where `uv`, which makes it, is missing."""
    folder = cache_dir() / f"trl-{TRL}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        sys.exit("uv is needed to install TRL: run `make setup`, or `pip install uv`")
    print(f"installing TRL {TRL} into {folder} ...", flush=True)
    environment = foreign_environment()
    if "PIP_FIND_LINKS" in environment:
        environment.setdefault("UV_FIND_LINKS", environment["PIP_FIND_LINKS"])
    elif "UV_FIND_LINKS" not in environment:
        environment.setdefault("UV_TORCH_BACKEND", "cpu")
    if "PIP_INDEX_URL" in environment:
        environment.setdefault("UV_DEFAULT_INDEX", environment["PIP_INDEX_URL"])
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in SAME_VERSIONS]
    run: Callable[..., Any] = partial(subprocess.run, check=True, env=environment)
    run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)])
    run([uv, "pip", "install", "-q", "--python", str(python), f"trl=={TRL}", *pins])
    (folder / "complete").touch()
    return python


def trl_settings(config: RunConfig, variant: str, *, autocast: bool, steps: int, seed: int) -> dict[str, Any]:
    """What `trl_peer.settings` makes a GRPOConfig of. `variant`: dtype of the weights and microbatches of a train step,
    as in `float32:4`."""
    dtype, microbatches = variant.split(":")
    per_step = config.batch_groups * config.rollout.group_size
    return {
        "model_path": str(resolve_model(config.model.path)),
        "output_dir": str(config.run_path),
        "dtype": dtype,
        "autocast": autocast,
        "microbatch": per_step // int(microbatches),
        "num_threads": config.learner.num_threads,
        "groups": config.batch_groups,
        "group_size": config.rollout.group_size,
        "steps": steps,
        "max_tokens": config.rollout.max_turn_tokens,
        "temperature": config.rollout.temperature,
        "learning_rate": config.learner.learning_rate,
        "max_grad_norm": config.learner.max_grad_norm,
        "clip_low": DapoConfig().clip_low,
        "clip_high": DapoConfig().clip_high,
        "seed": seed,
    }


def trl_process_environment(config: RunConfig) -> dict[str, str]:
    """As many threads as our learner has, and its allocator."""
    own = {"OMP_NUM_THREADS": str(config.learner.num_threads), "TOKENIZERS_PARALLELISM": "false", **KEEP_MEMORY}
    return foreign_environment() | own


def foreign_environment() -> dict[str, str]:
    """What this process was started with, without what would lead another interpreter to our packages. An engine in
    this process changes the environment: it brings an allocator and threads of its own."""
    return {name: value for name, value in _STARTED_WITH.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
