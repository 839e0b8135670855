"""The base class and shared types of all configuration models."""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

Precision = Literal["bfloat16", "float32"]
Dtype = Literal["auto", "bfloat16", "float32"]
T = TypeVar("T")
MAY_CHANGE = "may change on resume"
MayChange = Annotated[T, MAY_CHANGE]
"""A setting that does not change what is learned, so that a started run may continue with another value."""
CPU_INFO = Path("/proc/cpuinfo")

OwnPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A file or a folder; `~` is the home of the user."""


def _make_strict(schema: object) -> None:
    """Make every number and boolean in a schema refuse values of other types, such as true for 1."""
    if isinstance(schema, dict):
        if schema.get("type") in ("int", "float", "bool"):
            schema["strict"] = True
        for part in schema.values():
            _make_strict(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _make_strict(part)


class Config(BaseModel):
    """A frozen configuration model that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _make_strict(schema)
        return schema


def typed(default: str, **by_key: str) -> BeforeValidator:
    """Return a validator that completes the `type` of a discriminated union: a text is a table with this `type` alone.

    A table without `type` gets the one that `by_key` maps one of its keys to, else `default`.
    """

    def with_type(value: object) -> object:
        if isinstance(value, str):
            return {"type": value}
        if not isinstance(value, Mapping):
            return value
        return {"type": next((by_key[key] for key in by_key if key in value), default), **value}

    return BeforeValidator(with_type)


def types_of(annotation: object) -> dict[str, type[Config]]:
    """Return the models of a discriminated union by their `type`; empty for any other annotation."""
    models = [part for part in get_args(annotation) if isinstance(part, type) and issubclass(part, Config)]
    typed_ones = [model for model in models if "type" in model.model_fields]
    by_type = {name: model for model in typed_ones for name in get_args(model.model_fields["type"].annotation)}
    return by_type if len(by_type) > 1 else {}


def precision_of(dtype: Dtype, device: Literal["cpu", "cuda"]) -> Precision:
    """Return the precision that a recipe's `dtype` means on this machine."""
    return fastest_precision(device) if dtype == "auto" else dtype


def fastest_precision(device: Literal["cpu", "cuda"]) -> Precision:
    """Return bfloat16 for a GPU and for a CPU that multiplies it at full speed, else float32.

    Measured on the demo's layers, bfloat16 takes 1.8 times as long on an Intel CPU with AVX-512 but without AMX, and 5
    to 40 times without AVX-512.
    """
    info = cpu_info(CPU_INFO)
    flags = info.get("flags", "").split()
    fast_amd = "AuthenticAMD" in info.get("vendor_id", "") and "avx512_bf16" in flags
    return "bfloat16" if device == "cuda" or "amx_bf16" in flags or fast_amd else "float32"


def lacks_avx512() -> bool:
    """Return True for an x86 CPU without AVX-512, False for any other or unknown CPU."""
    flags = cpu_info(CPU_INFO).get("flags", "").split()
    return bool(flags) and "avx512f" not in flags


@lru_cache
def cpu_info(path: Path) -> dict[str, str]:
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    except OSError:
        return {}
    return {name.strip(): value for name, value in lines.items()}
