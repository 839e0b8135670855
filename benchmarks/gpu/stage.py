"""What every step of `gpu_device` is given and returns."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a step runs: on the card at the sizes of Qwen3-8B, or in a rehearsal on the CPU at tiny ones."""

    out: Path
    rehearsal: bool

    @property
    def device(self) -> str:
        return "cpu" if self.rehearsal else "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`values` are judged by their names, `told` is not; `planned` are the GiB of the plan that values are compared
    with."""

    values: Mapping[str, float | bool]
    told: Mapping[str, Any]
    planned: Mapping[str, float]


class MissingError(Exception):
    """The step cannot run here; the message says what is missing."""


def found(values: Mapping[str, float | bool], *, planned: Mapping[str, float] | None = None, **told: Any) -> Found:
    return Found(values=values, told=told, planned=planned or {})


def need(*modules: str) -> None:
    """Raises MissingError unless all of these can be imported. A folder without code, as of a library alone, cannot."""
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise MissingError(f"{name} cannot be imported")
