"""The `agentflow` command: its commands, and what a user sees of an error."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from configs.errors import UserError, did_you_mean, printable
from ray_jobs.commands import checks, jobs, results, training

MENDABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)
"""What the system refuses because of the place, and not because of a fault in this code."""

FULL_OBJECT_STORE = (
    "Ray's object store is full, and so is the disk of the folder that it moves objects to; `ray memory` says what it "
    "holds and `df` which disk is full: free space there, or start Ray with a larger object store or with "
    "--object-spilling-directory on another disk, and go on with `agentflow resume`"
)

QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def make_app() -> App:
    """The order of the commands is that of `agentflow --help`."""
    app = App(
        name="agentflow",
        help="Train the planner of a tool-using agent: asynchronous RL on Ray.\n\n"
        "`agentflow help COMMAND` says more of one.",
        help_format="plaintext",
        version=_version,
        default_parameter=Parameter(negative=(), show_default=lambda value: str(value) if value else None),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    app["--help"].group = app["--version"].group = "More commands"
    on_cluster = App(name="jobs", default_command=jobs.jobs, group="Commands", sort_key=3)
    on_cluster.command(jobs.logs)
    on_cluster.command(jobs.stop)
    users: tuple[Callable[..., int | None] | App, ...] = (
        *(
            training.init,
            training.train,
            training.resume,
            jobs.submit,
            on_cluster,
            results.evaluate,
            results.compare,
            results.view,
        ),
        *(results.solve, checks.plan, results.export, checks.doctor),
    )
    phases = (training.collect, training.label, training.train_prm)
    others = (results.serve, checks.run_code, checks.serve_tools)
    for place, command in enumerate((*users, *phases, *others)):
        group = "Commands" if place < len(users) else "More commands"
        if isinstance(command, App):
            app.command(command)
        else:
            app.command(command, group=group, sort_key=place)
    return app


def _version() -> str:
    from importlib.metadata import version

    return f"agentflow {version('agentflow-ray')}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. What the user can mend is one line on stderr and code 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    terminations: list[int] = []
    try:
        with _sigterm_interrupts(terminations):
            return int(make_app()(given) or 0)
    except KeyboardInterrupt as interrupt:
        what, code = ("ended by SIGTERM", 143) if terminations else ("interrupted", 130)
        print(f"agentflow: {what}{f'; {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        return code
    except Exception as error:
        line = _mistyped(error) if isinstance(error, CycloptsError) else _for_the_user(error)
        if line is None:
            raise
        print(f"agentflow: error: {printable(line)}", file=sys.stderr)
        return 2


@contextmanager
def _sigterm_interrupts(terminations: list[int]) -> Iterator[None]:
    """SIGTERM, which schedulers, containers and `ray job stop` send, does what Ctrl-C does, and adds itself to the
    list. By default it would end the process at once, with all that the process started left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        terminations.append(number)
        # Ray makes of whatever is raised here, while it waits, an exception of just this class.
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        # Only the main one is told of signals.
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _mistyped(error: CycloptsError) -> str:
    """One line on a command line that cannot be understood."""
    if isinstance(error, UnknownCommandError):
        word = (error.unused_tokens or [""])[0]
        return f"unknown command '{word}'; `agentflow help` lists them{did_you_mean(word, error.app or ())}"
    near = ""
    if isinstance(error, UnknownOptionError):
        word = error.token.keyword or error.token.value
        said = f"unrecognized arguments: {word}"
        near = did_you_mean(word, (name for one in error.argument_collection for name in one.names))
    elif isinstance(error, UnusedCliTokensError):
        said = f"unrecognized arguments: {' '.join(error.unused_tokens or ())}"
    elif isinstance(error, MissingArgumentError) and error.argument and error.keyword is None:
        said = f"required: {error.argument.name}"
    else:
        said = " ".join(str(error).split()).removesuffix(".")
    command = " ".join(("agentflow", *(error.command_chain or ())))
    return f"{said[0].lower()}{said[1:]}; `{command} --help` says what there is{near}"


def _for_the_user(error: BaseException) -> str | None:
    """One line, for an error whose message says what to do; None for one whose traceback is needed."""
    # Ray wraps what an actor raised, and its own text is the actor's traceback.
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    # Python's own have a number and say nothing of what to do; ours are a sentence.
    missing_file = type(error) is FileNotFoundError and error.errno is None
    if missing_file or isinstance(error, UserError):
        return " ".join(str(error).split())
    if _is_full_object_store(error):
        return FULL_OBJECT_STORE
    if isinstance(error, OSError) and error.errno in MENDABLE and error.filename is not None:
        return (
            f"cannot use '{error.filename}': {error.strerror}; see to its rights and free space, or name another place"
        )
    return None


def _is_full_object_store(error: BaseException) -> bool:
    # Only a process that has imported Ray can meet one, and to import it takes seconds.
    ray = sys.modules.get("ray.exceptions")
    return ray is not None and isinstance(error, (ray.OutOfDiskError, ray.ObjectStoreFullError))


if __name__ == "__main__":
    sys.exit(main())
