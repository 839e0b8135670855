"""What a user gives a command: a recipe with changed settings, and a policy. Imports nothing heavy by itself."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import UserError

if TYPE_CHECKING:
    from configs.run import RunConfig
    from envs.sandbox import SandboxState

DEFAULT_RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "demo_cpu.toml"


class GivenError(UserError):
    """A command line that means nothing; the message is one line for a person."""


def sorted_out(given: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """The recipe and the overrides, in whatever order they were given: a recipe is what has no `=`. The default one,
    where none is given. Raises GivenError."""
    recipes = [word for word in given if "=" not in word]
    if len(recipes) > 1:
        raise GivenError(
            f"unrecognized arguments: {' '.join(recipes[1:])}; the recipe is '{recipes[0]}', and a setting is given as "
            "key=value"
        )
    return Path(recipes[0]) if recipes else DEFAULT_RECIPE, tuple(word for word in given if "=" in word)


def run_config(given: Sequence[str], *, backend: str | None = None) -> "RunConfig":
    """The checked configuration. `backend` is KIND:MODEL. Raises GivenError and ConfigError."""
    from configs.loading import load_run_config

    path, changes = sorted_out(given)
    return load_run_config(path, [*changes, *_backend_overrides(backend)])


def acting_config(given: Sequence[str], *, backend: str | None = None, draws_tasks: bool = False) -> "RunConfig":
    """As `run_config`, for a command that only acts: what it needs of this machine is checked. Raises PreflightError
    besides."""
    config = run_config(given, backend=backend)
    from ray_jobs.run.preflight import check_before_acting

    tell_of_sandbox(check_before_acting(config, draws_tasks=draws_tasks))
    return config


def tell_of_sandbox(state: "SandboxState | None") -> None:
    """On stderr, where it is not the first choice."""
    if state is not None and state.without:
        print(f"agentflow: code sandbox: {state}", file=sys.stderr)


def checkpoint_of(adapter: str | None) -> Path | None:
    """The checkpoint that `--adapter` names, None for the base model. Raises CheckpointError."""
    if adapter in (None, "none"):
        return None
    from ray_jobs.run.begun import checkpoint_at

    return checkpoint_at(Path(adapter).expanduser())


def _backend_overrides(backend: str | None) -> list[str]:
    """In the words of the configuration, which says what is wrong with it."""
    kind, _, model = (backend or "").partition(":")
    if not kind:
        return []
    key = "model.path" if kind == "vllm" else "backend.model"
    return [f"backend.type={json.dumps(kind)}", *([f"{key}={json.dumps(model)}"] if model else [])]
