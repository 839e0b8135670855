"""The arguments and options of the commands, what several commands do with them, and the text of errors."""

import errno
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from configs.errors import UserError

if TYPE_CHECKING:
    from configs.run import RunConfig
    from envs.sandbox import SandboxState

DEFAULT_RECIPE = Path(__file__).parents[1] / "configs" / "recipes" / "demo_cpu.toml"


def _names(_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    text = tokens[-1].value
    if text == "all":
        from envs.datasets.benchmarks import BENCHMARKS

        return tuple(BENCHMARKS)
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


Formats = Literal["hf", "gguf", "hf,gguf"]
Phase = Literal["train", "resume", "collect", "label", "train-prm", "evaluate"]
Quantization = Literal["bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]

Given = Annotated[
    str,
    Parameter(
        name="RECIPE key=value",
        help="TOML file or name of a built-in recipe (default demo_cpu), and settings, e.g. learner.learning_rate=2e-6",
    ),
]
Recipe = Annotated[str | None, Parameter(metavar="RECIPE", help="the recipe as an option, anywhere on the line")]
Count = Annotated[int, Parameter(validator=Number(gte=1))]
Seconds = Annotated[float, Parameter(validator=Number(gt=0, lt=math.inf), metavar="S")]
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
        help="vllm:FOLDER (a merged model), ollama:MODEL or openai:MODEL; backend.base_url=... is the server's address",
    ),
]
Folder = Annotated[Path | None, Parameter(metavar="FOLDER")]
File = Annotated[Path | None, Parameter(metavar="FILE")]
Benchmarks = Annotated[
    tuple[str, ...],
    Parameter(
        converter=_names,
        metavar="NAME[,NAME]",
        help="bamboogle, 2wiki, hotpotqa, musique, gaia, aime24, amc23, game24, gpqa, medqa, or all; without it the "
        "recipe's held-out tasks (evaluation.mix)",
    ),
]
PhaseOptions = Annotated[
    tuple[str, ...],
    Parameter(
        converter=lambda _, tokens: tuple(shlex.split(tokens[-1].value)),
        metavar="TEXT",
        allow_leading_hyphen=True,
        help="more options of the phase's command, e.g. --options='--benchmark gpqa --limit 20'",
    ),
]


def split_arguments(given: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """Return the recipe (by default the CPU demo) and the overrides, which may come in any order.

    A word without `=`, or with a slash before it, is a recipe.
    """
    overrides = tuple(word for word in given if "=" in word and "/" not in word.partition("=")[0])
    recipes = [word for word in given if word not in overrides]
    if len(recipes) > 1:
        raise UserError(
            f"unrecognized arguments: {' '.join(recipes[1:])}; the recipe is '{recipes[0]}', and a setting is given as "
            "key=value"
        )
    return Path(recipes[0]) if recipes else DEFAULT_RECIPE, overrides


def run_config(given: Sequence[str], *, backend: str | None = None) -> "RunConfig":
    """Load and validate the configuration; `backend` is KIND:MODEL."""
    from configs.loading import load_run_config

    path, changes = split_arguments(given)
    kind, _, model = (backend or "").partition(":")
    if kind:
        changes += (f"backend.type={json.dumps(kind)}",)
    if model:
        changes += (f"{'model.path' if kind == 'vllm' else 'backend.model'}={json.dumps(model)}",)
    return load_run_config(path, changes)


def acting_config(given: Sequence[str], *, backend: str | None = None, draws_tasks: bool = False) -> "RunConfig":
    """Load the configuration for a command that does not train, and check what the command needs of this machine."""
    config = run_config(given, backend=backend)
    from ray_jobs.run.preflight import check_before_acting

    show_sandbox(check_before_acting(config, draws_tasks=draws_tasks))
    return config


def show_sandbox(state: "SandboxState | None") -> None:
    """Print the state of the code sandbox on stderr if it has less isolation than it could have."""
    if state is not None and state.without:
        print(f"agentflow: code sandbox: {state}", file=sys.stderr)


def checkpoint_of(adapter: str | None) -> Path | None:
    """Return the checkpoint that `--adapter` names; None is the base model."""
    if adapter in (None, "none"):
        return None
    from ray_jobs.run.origin import checkpoint_at

    return checkpoint_at(Path(adapter).expanduser())


PLACE_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)
"""Errors of the operating system that come from the chosen path, not from a fault in this code."""

FULL_OBJECT_STORE = (
    "Ray's object store is full, and so is the disk that it spills to: see `ray memory` and `df`; free space there, or "
    "start Ray with a larger object store or with --object-spilling-directory on another disk, and continue with "
    "`agentflow resume`"
)


def user_error(error: BaseException) -> str | None:
    """Return one line for an error whose message is for the user; None for a bug, which needs its traceback."""
    # Ray wraps the exception of an actor; the wrapper's text is the actor's traceback.
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    # Python's FileNotFoundError has a number; ours have a sentence with a remedy instead.
    missing_file = type(error) is FileNotFoundError and error.errno is None
    if missing_file or isinstance(error, UserError):
        return str(error)
    # Only a process that has imported Ray can meet its errors, and importing it takes seconds.
    ray = sys.modules.get("ray.exceptions")
    if ray is not None and isinstance(error, (ray.OutOfDiskError, ray.ObjectStoreFullError)):
        return FULL_OBJECT_STORE
    if isinstance(error, OSError) and error.errno in PLACE_ERRORS and error.filename is not None:
        return (
            f"cannot use '{error.filename}': {error.strerror}; check its permissions and free space, or name another "
            "place"
        )
    return None
