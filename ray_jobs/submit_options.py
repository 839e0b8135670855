"""The options of `agentflow submit`, `status`, `logs` and `stop`."""

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("pipeline", "train", "resume", "collect", "label", "train-prm", "evaluate")
ACTING_PHASES = ("collect", "label", "train-prm", "evaluate")
"""They work in their own process, and start no actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """`recipe` is a recipe, or for `resume` also the folder of a run. `runtime_env` is Ray's, to be added to ours."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    phase: str = "pipeline"
    address: str | None = None
    working_dir: Path = Path()
    follow: bool = False
    phase_options: tuple[str, ...] = ()
    runtime_env: Mapping[str, Any]


def add_submit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--phase", choices=PHASES, default="pipeline", help="what to run there (default pipeline)")
    parser.add_argument(
        "--working-dir", type=Path, default=Path(), metavar="FOLDER", help="what travels, without caches and runs (.)"
    )
    parser.add_argument("--follow", action="store_true", help="print the job's log until it has ended")
    parser.add_argument(
        "--options",
        type=_words,
        default=(),
        metavar="TEXT",
        help="further options of the phase's own command, e.g. --options='--benchmark gpqa --limit 20'",
    )
    parser.add_argument(
        "--runtime-env",
        type=_runtime_env,
        default={},
        metavar="FILE",
        help="YAML or JSON to add to the job's environment, as Ray takes it (pip, env_vars, excludes, ...)",
    )
    add_address(parser)


def add_address(parser: argparse.ArgumentParser) -> None:
    says = (
        "http://host:8265 (the dashboard) or host:port of a cluster; else RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or the"
    )
    parser.add_argument("--address", metavar="A", help=f"{says} cluster on this machine")


def submit_options(options: argparse.Namespace) -> SubmitOptions:
    return SubmitOptions(
        recipe=options.recipe,
        overrides=tuple(options.overrides),
        phase=options.phase,
        address=options.address,
        working_dir=options.working_dir,
        follow=options.follow,
        phase_options=options.options,
        runtime_env=options.runtime_env,
    )


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text!r}") from error


def _runtime_env(text: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(Path(text).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or "working_dir" in found:
        raise argparse.ArgumentTypeError(f"{text} is no runtime environment without working_dir")
    return found
