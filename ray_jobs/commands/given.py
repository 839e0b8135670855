"""What a user gives a command: a recipe with changed settings, a policy, and the options that several commands share.
Imports nothing heavy by itself."""

import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from configs.errors import UserError

if TYPE_CHECKING:
    from configs.run import RunConfig
    from envs.sandbox import SandboxState

DEFAULT_RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "demo_cpu.toml"


class GivenError(UserError):
    """A command line that means nothing; the message is one line for a person."""


def sorted_out(given: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """The recipe and the overrides, in whatever order they were given: a recipe is what has no `=`, or a slash before
    it. The default one, where none is given. Raises GivenError."""
    recipes = [word for word in given if not _is_setting(word)]
    if len(recipes) > 1:
        raise GivenError(
            f"unrecognized arguments: {' '.join(recipes[1:])}; the recipe is '{recipes[0]}', and a setting is given as "
            "key=value"
        )
    return Path(recipes[0]) if recipes else DEFAULT_RECIPE, tuple(filter(_is_setting, given))


def _is_setting(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and "/" not in key


def run_config(given: Sequence[str], *, backend: str | None = None) -> "RunConfig":
    """The checked configuration. `backend` is KIND:MODEL. Raises GivenError and UserError."""
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


Value = TypeVar("Value")


def read_by(read: Callable[[str], Value]) -> Callable[[Any, Sequence[Token]], Value]:
    """A converter for an option that is given as one text; `read` raises ValueError with what it must be."""
    return lambda _, tokens: read(tokens[-1].value)


def _names(text: str) -> tuple[str, ...]:
    if text == "all":
        from envs.datasets.benchmarks import BENCHMARKS

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
