"""What is asked of a cluster. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Phase = Literal["train", "resume", "collect", "label", "train-prm", "evaluate"]
PHASES: tuple[Phase, ...] = get_args(Phase)
ACTING_PHASES = ("collect", "label", "train-prm", "evaluate")
"""They work in their own process, and start no actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """`recipe` is a recipe, or for `resume` also the folder of a run. `runtime_env` is Ray's, to be added to ours."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    phase: Phase = "train"
    address: str | None = None
    working_dir: Path = Path()
    follow: bool = False
    phase_options: tuple[str, ...] = ()
    runtime_env: Mapping[str, Any]
