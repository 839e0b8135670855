"""Runs code texts in one namespace and says how each of them ended, in words for a model."""

import builtins
import contextlib
import random
import sys
import traceback
import types
from typing import Any

from envs.sandbox.source import ForbiddenImportError, compile_source

_MAX_MESSAGE_CHARS = 2000
_STDOUT = 1


class Runner:
    """Everything here can be bent by the code that it runs: its answers concern that code and nobody else."""

    def __init__(self, *, check_imports: bool) -> None:
        self._check_imports = check_imports
        sys.set_int_max_str_digits(0)  # the clock bounds the conversion, and long numbers are answers here
        self._stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        self._stdout = open(  # noqa: SIM115
            _STDOUT, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        vars(builtins).update(exit=sys.exit, quit=sys.exit)  # the site module, which is not loaded, has them
        self._module = types.ModuleType("__main__")
        self._module.__dict__["__builtins__"] = builtins

    def run(self, source: bytes) -> tuple[str, str]:
        """The error category ("" when all went well) and its message."""
        self._reset_process_state()
        try:
            statements, last = compile_source(source.decode(), check_imports=self._check_imports)
        except ForbiddenImportError as error:
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

    def _execute(self, statements: types.CodeType, last: types.CodeType | None) -> None:
        names = self._module.__dict__
        try:
            exec(statements, names)
            value = eval(last, names) if last else None
            if value is not None:
                print(repr(value))
        finally:
            self._flush()

    def _reset_process_state(self) -> None:
        sys.modules["__main__"] = self._module
        sys.stdin, sys.stdout, sys.stderr = self._stdin, self._stdout, self._stdout
        random.seed(0)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(0)

    def _flush(self) -> None:
        for stream in (sys.stdout, self._stdout):
            with contextlib.suppress(Exception):  # the code closed or replaced it, and that is its doing
                stream.flush()


def _message(error: BaseException) -> str:
    last_line = traceback.format_exception_only(type(error), error)[-1].strip()
    text = last_line[:_MAX_MESSAGE_CHARS]
    line = _line_number(error)
    return f"{text} (line {line})" if line else text


def _line_number(error: BaseException) -> int | None:
    if isinstance(error, SyntaxError):
        return error.lineno
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<code>"]
    return lines[-1] if lines else None
