"""The code process: forked into its cell, it drops all rights and then runs code texts."""

import ast
import builtins
import contextlib
import fcntl
import os
import random
import resource
import signal
import socket
import sys
import textwrap
import traceback
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, NoReturn

from envs import kernel
from envs.sandbox.protocol import (
    ALLOWED_IMPORTS,
    BORN,
    MAX_CPU_S,
    READY,
    SandboxSettings,
    encode_frame,
    split_frame,
)

_FILE_NAME = "<code>"
_FENCE = "```"


def compile_source(source: str, *, check_imports: bool) -> tuple[CodeType, CodeType | None]:
    """Compile the statements and the bare last expression, whose value is shown.

    Raises ImportError for an import that is not on the list. This check only gives a clear message: the kernel stops
    code that hides an import from it.
    """
    stripped = source.strip()
    if stripped.startswith(_FENCE) and stripped.endswith(_FENCE) and "\n" in stripped:
        source = stripped.split("\n", 1)[1].removesuffix(_FENCE)
    try:
        tree = ast.parse(source, _FILE_NAME)
    except IndentationError:
        tree = ast.parse(textwrap.dedent(source).strip(), _FILE_NAME)
    if check_imports:
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or "."]
            for name in (module.partition(".")[0] or "." for module in modules):
                if name not in ALLOWED_IMPORTS:
                    available = ", ".join(sorted(ALLOWED_IMPORTS))
                    raise ImportError(f"import of '{name}' is not allowed; available: {available}")
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        expression = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        last = compile(expression, _FILE_NAME, "eval")
    return compile(tree, _FILE_NAME, "exec"), last


_MAX_MESSAGE_CHARS = 2000


class Runner:
    """Interpreter of an episode. The code can tamper with it, so its answers are trusted only about that code."""

    def __init__(self, *, check_imports: bool) -> None:
        self._check_imports = check_imports
        sys.set_int_max_str_digits(0)  # the time limit bounds the conversion, and long numbers are valid answers
        self._stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        self._stdout = open(1, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        vars(builtins).update(exit=sys.exit, quit=sys.exit)  # defined by the site module, which is not loaded
        self._module = ModuleType("__main__")
        self._module.__dict__["__builtins__"] = builtins

    def run(self, source: bytes) -> tuple[str, str]:
        """Run a source; return the error category, empty without an error, and its message."""
        sys.modules["__main__"] = self._module
        sys.stdin, sys.stdout, sys.stderr = self._stdin, self._stdout, self._stdout
        random.seed(0)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(0)
        try:
            statements, last = compile_source(source.decode(), check_imports=self._check_imports)
        except ImportError as error:
            return "forbidden-import", str(error)
        except (SyntaxError, ValueError) as error:
            return "syntax", _message(error)
        except (RecursionError, MemoryError):
            return "syntax", "SyntaxError: the code is nested too deeply"
        try:
            self._execute(statements, last)
        except SystemExit as error:
            return ("", "") if error.code in (None, 0) else ("exception", _message(error))
        except MemoryError:
            return "memory", "MemoryError: the code needs more memory than it may have"
        except BaseException as error:
            return "exception", _message(error)
        return "", ""

    def _execute(self, statements: CodeType, last: CodeType | None) -> None:
        names = self._module.__dict__
        try:
            exec(statements, names)
            value = eval(last, names) if last else None
            if value is not None:
                print(repr(value))
        finally:
            for stream in (sys.stdout, self._stdout):
                with contextlib.suppress(Exception):  # the code may have closed or replaced it
                    stream.flush()


def _message(error: BaseException) -> str:
    text = traceback.format_exception_only(type(error), error)[-1].strip()[:_MAX_MESSAGE_CHARS]
    if isinstance(error, SyntaxError):
        line = error.lineno
    else:
        frames = traceback.walk_tb(error.__traceback__)
        line = next((line for frame, line in reversed([*frames]) if frame.f_code.co_filename == _FILE_NAME), None)
    return f"{text} (line {line})" if line else text


_MIB = 1 << 20


def apply_limits(memory_mb: int) -> None:
    """Set hard and soft limits, so that the code cannot raise them. NPROC has no effect on root."""
    for kind, limit in (
        (resource.RLIMIT_CPU, MAX_CPU_S),
        (resource.RLIMIT_AS, memory_mb * _MIB),
        (resource.RLIMIT_FSIZE, 4 * _MIB),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_STACK, 16 * _MIB),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, ceiling = resource.getrlimit(kind)
        bound = limit if ceiling == resource.RLIM_INFINITY else min(limit, ceiling)
        resource.setrlimit(kind, (bound, bound))


NONCE_BYTES = 16
_REQUESTS, _RESULTS, _FIRST_UNUSED = 3, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlan:
    """Properties shared by all code processes of a zygote."""

    settings: SandboxSettings
    layers: list[str]
    readable: list[str]


@dataclass(frozen=True, slots=True)
class Cell:
    """The warden's handle of a code process: descriptors of its requests, results and output."""

    pid: int
    pidfd: int
    requests: int
    results: int
    output: int


def start_cell(plan: CellPlan, folder: str, link: socket.socket) -> Cell:
    """Start a code process that may write only to `folder`; the kernel reports its id to the host over `link`."""
    request_reader, request_writer = os.pipe()
    result_reader, result_writer = os.pipe()
    output_reader, output_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live_in_cell(plan, folder, link, (request_reader, result_writer, output_writer))
    for inside in (request_reader, result_writer, output_writer):
        os.close(inside)
    for outside in (request_writer, result_reader, output_reader):
        os.set_blocking(outside, False)
    return Cell(pid, os.pidfd_open(pid), request_writer, result_reader, output_reader)


def _live_in_cell(plan: CellPlan, folder: str, link: socket.socket, pipes: tuple[int, int, int]) -> NoReturn:
    try:
        link.send(BORN)
        _arrange_descriptors(*pipes)
        try:
            _drop_rights(plan, folder)
        except OSError as error:
            os.write(_RESULTS, encode_frame(f"the code process could not drop its rights: {error}".encode()))
            os._exit(1)
        runner = Runner(check_imports=plan.settings.check_imports)
        os.write(_RESULTS, encode_frame(READY))
        received = b""
        while chunk := os.read(_REQUESTS, 1 << 16):
            received += chunk
            while (split := split_frame(received)) is not None:
                request, received = split
                nonce = request[:NONCE_BYTES]
                category, message = runner.run(request[NONCE_BYTES:])
                answer = encode_frame(nonce + f"{category}\n{message}".encode(errors="backslashreplace"))
                if os.write(_RESULTS, answer) != len(answer):
                    raise ConnectionError("the result pipe is full")
    finally:
        os._exit(1)


def _arrange_descriptors(requests: int, results: int, output: int) -> None:
    """Keep only five descriptors in the cell; input() reads the end of a file."""
    nothing, writer = os.pipe()
    os.close(writer)
    # Moved to high numbers first: a source may have the number that another one needs.
    high = [fcntl.fcntl(wanted, fcntl.F_DUPFD, 256) for wanted in (nothing, output, output, requests, results)]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number)
    os.closerange(_FIRST_UNUSED, 1 << 16)


def _drop_rights(plan: CellPlan, folder: str) -> None:
    """Drop all rights. Order matters: each step forbids something that the earlier ones need."""
    os.setsid()
    os.umask(0o077)
    os.environ.clear()
    os.chdir(folder)
    if "rlimits" in plan.layers:
        apply_limits(plan.settings.memory_mb)
    kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    kernel.set_dumpable(False)
    if "landlock" in plan.layers:
        # Only without a tmpfs of its own must all files of an episode be counted.
        rights = kernel.WRITE if "namespaces" in plan.layers else kernel.ADD
        kernel.restrict_files({**dict.fromkeys(plan.readable, kernel.READ), folder: rights})
    kernel.die_with_parent(signal.SIGKILL)
    if "seccomp" in plan.layers:
        kernel.restrict_calls(kernel.filter_program(kernel.CELL_CALLS, kernel.CELL_CHOSEN, kernel.CELL_WITHOUT))
