"""TRL in an environment of its own, with our versions of what both stand on; made at its first use."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from learner.demo_model import cache_dir

TRL = "1.16.0"
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


def foreign_environment() -> dict[str, str]:
    """Ours, without what would lead another interpreter to our packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
