"""The options that several commands share, and how texts become their values. Imports nothing heavy."""

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Parameter, Token
from cyclopts.validators import Number

Value = TypeVar("Value")


def read_by(read: Callable[[str], Value]) -> Callable[[Any, Sequence[Token]], Value]:
    """A converter for an option that is given as one text; `read` raises ValueError with what it must be."""
    return lambda _, tokens: read(tokens[-1].value)


def _names(text: str) -> tuple[str, ...]:
    if text == "all":
        from envs.benchmarks.registry import BENCHMARKS

        return tuple(BENCHMARKS)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError(f"'{text}' names no benchmark")
    return names


def _runtime_env(text: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(Path(text).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{text}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or "working_dir" in found:
        raise ValueError(f"{text} is no runtime environment without working_dir")
    if fault := _fault_of_runtime_env(found):
        raise ValueError(f"{text}: {fault}")
    return found


def _fault_of_runtime_env(found: dict[str, Any]) -> str | None:
    """What of it Ray would refuse, or be given as something else. Values may be secret, and are not shown."""
    if empty := [name for name, value in found.items() if value is None]:
        return f"{empty[0]} is empty; give it a value, or leave it out"
    variables, excludes = found.get("env_vars", {}), found.get("excludes", [])
    if not isinstance(variables, dict):
        return f"env_vars must be a table of NAME: value, not {_kind(variables)}"
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            return f"env_vars.{name} must be text, not {_kind(value)}; put it in quotes"
    if not isinstance(excludes, list) or not all(isinstance(one, str) for one in excludes):
        return f"excludes must be a list of patterns, such as [big/], not {_kind(excludes)}"
    return None


def _kind(value: object) -> str:
    names = {str: "text", list: "a list", dict: "a table", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


def _formats(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if set(names) - set(FORMATS):
        raise ValueError(f"'{text}' is none of hf, gguf and hf,gguf")
    return names


FORMATS = ("hf", "gguf")

Given = Annotated[
    str,
    Parameter(
        name="RECIPE key=value",
        help="TOML file or name of a built-in recipe (default demo_cpu), and settings, e.g. learner.learning_rate=2e-6",
    ),
]
Recipe = Annotated[str | None, Parameter(metavar="RECIPE", help="as an option, it may stand before the settings")]

Count = Annotated[int, Parameter(validator=Number(gte=1))]
Seconds = Annotated[float, Parameter(validator=Number(gt=0, lt=math.inf))]

RunFolder = Annotated[Path, Parameter(name="RUN", help="folder of a run, below runs/")]
Adapter = Annotated[
    str | None,
    Parameter(
        metavar="RUN|CHECKPOINT",
        help="run folder (its newest checkpoint), a checkpoint, or its adapter file; `none` is the base model",
    ),
]
Backend = Annotated[
    str | None,
    Parameter(
        metavar="KIND:MODEL",
        help="vllm:FOLDER (a merged model), ollama:MODEL or openai:MODEL; backend.base_url=... says where it listens",
    ),
]
Folder = Annotated[Path | None, Parameter(metavar="FOLDER")]
File = Annotated[Path | None, Parameter(metavar="FILE")]

Job = Annotated[str, Parameter(name="JOB", help="as `agentflow submit` named it")]
Address = Annotated[
    str | None,
    Parameter(
        metavar="A",
        help="http://host:8265 (the dashboard) or host:port of a cluster; else RAY_API_SERVER_ADDRESS, RAY_ADDRESS, "
        "or the cluster on this machine",
    ),
]
Words = Annotated[
    tuple[str, ...],
    Parameter(
        converter=read_by(lambda text: tuple(shlex.split(text))),
        metavar="TEXT",
        allow_leading_hyphen=True,
        help="further ones of the phase's own command, e.g. --options='--benchmark gpqa --limit 20'",
    ),
]
RuntimeEnv = Annotated[
    dict[str, Any] | None,
    Parameter(
        converter=read_by(_runtime_env),
        metavar="FILE",
        help="YAML or JSON to add to the job's environment, as Ray takes it (pip, env_vars, excludes, ...)",
    ),
]

Benchmarks = Annotated[
    tuple[str, ...],
    Parameter(
        converter=read_by(_names),
        metavar="NAME[,NAME]",
        help="bamboogle, 2wiki, hotpotqa, musique, gaia, aime24, amc23, game24, gpqa, medqa, or all; none: the "
        "recipe's held-out tasks (evaluation.mix)",
    ),
]
Formats = Annotated[tuple[str, ...], Parameter(converter=read_by(_formats), metavar="hf,gguf", show_default="hf,gguf")]
Quantization = Literal["bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
