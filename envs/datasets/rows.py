"""Rows of data sets: reading them from files, and the hashes that split their questions.

The hash of a question alone decides its split and its purpose, so that no question is in two of them.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from configs.errors import reason
from envs.types import Task

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, object]

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")

Purpose = Literal["rl", "demonstrations", "prm"]
# One entry per slot: RL gets half of the training questions, the other two a quarter each.
_PURPOSES: tuple[Purpose, ...] = ("rl", "rl", "demonstrations", "prm")


class TooFewTasksError(ValueError):
    """More tasks were requested than a data set has."""

    def __init__(self, dataset: str, split: Split, *, wanted: int, available: int) -> None:
        lower = "evaluation.num_tasks" if split == "eval" else "their number"
        super().__init__(
            f"{dataset!r} has {available} {split} tasks, but {wanted} are needed; lower {lower} or add rows"
        )


def split_of(key: str) -> Split:
    """Return the split of a key: the same in every process and for every seed."""
    return SPLITS[_digest(f"split:{key}")[0] % len(SPLITS)]


def purpose_of(question: str) -> Purpose:
    """Return the purpose of a training question; case, spacing and punctuation make no difference."""
    return _PURPOSES[_digest(f"purpose:{question_key(question)}")[0] % len(_PURPOSES)]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def kept_with(task: Task) -> str:
    """Return the text whose hash decides the split of a task.

    It is `kept_with` of the task's metadata, which groups tasks that ask the same in different words, or else the
    question.
    """
    return str(task.metadata.get("kept_with") or task.question)


def question_key(question: str) -> str:
    """Return a hash of a question that ignores case, spacing and punctuation."""
    folded = unicodedata.normalize("NFKC", question).casefold()
    return hashlib.sha256(" ".join(re.findall(r"\w+|[-+*/=^<>]", folded)).encode(errors="replace")).hexdigest()


def local_rows(path: Path) -> list[Row]:
    """Read a JSON Lines or a Parquet file. Raises ValueError for any other content."""
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow.parquet import read_table

        try:
            return plain_rows(read_table(path))
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is not a Parquet file: {reason(error)}") from None
    try:
        # Some editors write a byte order mark before the first line.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(rows[-1], dict):
                raise ValueError(f"{path}, line {number} is not a JSON object")
    return rows


def plain_rows(table: "pyarrow.Table") -> list[Row]:
    """Return the rows of a table as JSON values.

    Dates and decimals become texts. Empty values, and values that JSON cannot hold such as pictures, are left out.
    """
    text = json.dumps(table.to_pylist(), default=_as_text)
    return [{name: value for name, value in row.items() if value is not None} for row in json.loads(text)]


def _as_text(value: object) -> str | None:
    return str(value) if isinstance(value, date | time | Decimal) else None
