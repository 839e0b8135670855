"""What a user sees of an error: one line that says what to do. Imports nothing heavy, so that sandboxes stay small."""

import difflib
import re
from collections.abc import Iterable

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class UserError(RuntimeError):
    """An error whose message is one line that says what is wrong and what to do. The command line prints that line,
    without a traceback, and ends with exit code 2; also where an actor raised it."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message, "; did you mean 'train'?", or nothing where no known word is near. Of dotted names the last
    part decides, and then the table."""
    leaves: dict[str, list[str]] = {}
    for name in known:
        leaves.setdefault(name.rpartition(".")[2], []).append(name)
    table, _, leaf = word.rpartition(".")
    close = difflib.get_close_matches(leaf, leaves)
    beside = [name for found in close for name in leaves[found] if name.rpartition(".")[0] == table]
    near = (beside if table else [])[:1] or [name for found in close[:1] for name in leaves[found]]
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""


def printable(text: str) -> str:
    """What models and web pages may have written, for a terminal: without control characters, which it would obey."""
    return _CONTROL.sub("", re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text.replace("\r\n", "\n")))


def whole_letters(text: str) -> str:
    """With a question mark for half a surrogate pair: JSON can hold one and a model may write one, but it has no UTF-8,
    no tokenizer reads it, and it would break whoever sends it or writes it down."""
    return text.encode(errors="replace").decode()
