"""User errors, readable descriptions of library errors, and cleaning of untrusted text and JSON.

Imports nothing heavy, because the sandbox loads this module in every process.
"""

import difflib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

MAX_JSON_DEPTH = 100
"""Depth limit of JSON that is passed on: many readers and writers give up at 200."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class UserError(RuntimeError):
    """An error whose message, one line, says what is wrong and what to do; the command line ends with it and code 2."""


def user_error(error: BaseException) -> str | None:
    """Return one line for an error whose message is for the user; None for a bug, which needs its traceback."""
    # Ray wraps the exception of an actor; the wrapper's text is the actor's traceback.
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        # Python's has a number, and is a bug; ours have a sentence with a remedy instead.
        return str(error) if error.errno is None else None
    # Only a process that has imported Ray can meet its errors, and importing it takes seconds.
    ray = sys.modules.get("ray.exceptions")
    if ray is not None and isinstance(error, (ray.OutOfDiskError, ray.ObjectStoreFullError)):
        return (
            "Ray's object store is full, and so is the disk that it spills to: see `ray memory` and `df`; free space "
            "there, or start Ray with a larger object store or with --object-spilling-directory on another disk"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot use '{error.filename}': {error.strerror}; check permissions and space, or name another place"
    return None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'train'?" for the nearest known word with a similar last part, or an empty string."""
    names = list(known)
    close = difflib.get_close_matches(word.rpartition(".")[2], [name.rpartition(".")[2] for name in names], n=1)
    similar = [name for name in names if name.rpartition(".")[2] in close]
    near = difflib.get_close_matches(word, similar, n=1, cutoff=0)
    return f"; did you mean {near[0]!r}?" if near else ""


def reason(error: Exception) -> str:
    """Return the cause of an error in one line, for use in a message about a file or its content."""
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"there is no {Path(error.filename).name}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror[0].lower()}{error.strerror[1:]}"
    if isinstance(error, KeyError):
        return f"{error} is missing in it"
    if isinstance(error, ValueError) and hasattr(error, "errors"):
        # pydantic's ValidationError, which is not imported here.
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return " ".join(str(error).split())


def listed(names: Iterable[str], word: str = "or") -> str:
    """Return the names as "'a', 'b' or 'c'"."""
    *most, last = (repr(name) for name in names)
    return f"{', '.join(most)} {word} {last}" if most else last


def printable(text: str) -> str:
    """Remove control characters and terminal codes from untrusted text before it is printed."""
    return _CONTROL.sub("", _TERMINAL_CODE.sub("", text.replace("\r\n", "\n")))


def whole_letters(text: str) -> str:
    """Replace lone surrogates, which JSON can hold and no tokenizer accepts, by question marks."""
    return text.encode(errors="replace").decode()


def each_text(value: object, change: Callable[[str], str]) -> object:
    """Return a JSON value with every string and object key changed; raises RecursionError."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [each_text(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): each_text(item, change) for name, item in value.items()}
    return value


def in_whole_letters(value: object) -> object:
    """Return a JSON value without lone surrogates; raises RecursionError."""
    return each_text(value, whole_letters)


def check_depth(value: object, most: int = MAX_JSON_DEPTH) -> None:
    """Raise RecursionError if more than `most` lists and objects are nested in each other."""
    if isinstance(value, list | dict):
        if not most:
            raise RecursionError
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, most - 1)
