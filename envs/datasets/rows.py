"""Rows of data sets: reading them from files, and the hashes that split their questions.

The hash of a question alone decides its split and its purpose, so that no question is in two of them.
"""

import csv
import hashlib
import io
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from configs.errors import MAX_JSON_DEPTH, check_depth, reason
from envs.leakage import is_sign
from envs.types import Task

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, object]

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")

Purpose = Literal["rl", "demonstrations", "prm"]
# One entry per slot: of the training questions RL gets half, the other two a quarter each.
_PURPOSES: tuple[Purpose, ...] = ("rl", "rl", "demonstrations", "prm")

_BEFORE = {"<super>": "^", "<sub>": "_", "<fraction>": " "}
"""Written before a raised, a lowered or a fraction character, which are normal ones from then on: x² is no x2."""
_NO_ASCII = re.compile(r"[^\x00-\x7f]")
_SAME_SIGN = str.maketrans("−–‐‑×·⋅÷⁄∕’‘′", "----***///'''")
_QUOTED = re.compile(r"(?<![\w'])'([^']*)'(?!\w)")
_AROUND_SIGN = re.compile(r"\s*([-+*/^=<>|!()\[\]{}])\s*")
_NEAR = r"[-+*/^=<>|\d]"
_TOKEN = re.compile(
    # Punctuation that is a sign: a prime, a factorial, C#, 3:4, .5, and brackets beside a number or an operator.
    rf"(\w+|(?:(?<=\b\w)|(?<=[\d)\]}}]))[!'#]+|[.:](?=\d)|(?<={_NEAR})[()\[\]{{}}]|[()\[\]{{}}](?={_NEAR}))|([^\w\s])"
)


def split_of(key: str) -> Split:
    """Return the split of a key: the same in every process and for every seed."""
    return SPLITS[hashlib.sha256(f"split:{key}".encode()).digest()[0] % len(SPLITS)]


def purpose_of(question: str) -> Purpose:
    """Return the purpose of a training question."""
    return _PURPOSES[hashlib.sha256(f"purpose:{question_key(question)}".encode()).digest()[0] % len(_PURPOSES)]


def kept_with(task: Task) -> str:
    """Return the text whose hash decides the split of a task: `kept_with` of its metadata, or else the question."""
    return str(task.metadata.get("kept_with") or task.question)


def question_key(question: str) -> str:
    """Return a hash of a question that ignores case, spacing and punctuation.

    Vowel signs, symbols and mathematical signs are kept, and punctuation where it is one, as in f'(2), 5! and [1, 2).
    """
    spelled = _NO_ASCII.sub(
        lambda char: _BEFORE.get(unicodedata.decomposition(char[0]).split(" ")[0], "") + char[0], question
    )
    folded = unicodedata.normalize("NFKC", spelled).casefold().translate(_SAME_SIGN)
    tight = _AROUND_SIGN.sub(r"\1", _QUOTED.sub(r"\1", folded))
    tokens = (kept or sign for kept, sign in _TOKEN.findall(tight) if kept or is_sign(sign))
    return hashlib.sha256(" ".join(tokens).encode(errors="replace")).hexdigest()


def local_rows(path: Path) -> list[Row]:
    """Read a JSON Lines, CSV or Parquet file. Raises OSError, and ValueError that names the file and the row."""
    if path.suffix.lower() == ".parquet":
        from pyarrow.parquet import ParquetFile

        content = io.BytesIO(path.read_bytes())
        try:
            return plain_rows(ParquetFile(content).read())
        except Exception as error:
            # Damaged bytes can raise anything.
            raise ValueError(f"{path} cannot be read as Parquet: {reason(error)}") from None
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line} is not UTF-8 text; write JSON Lines or CSV in UTF-8, uncompressed, or name a Parquet "
            "file *.parquet"
        ) from None
    return _csv_rows(text, path) if path.suffix.lower() == ".csv" else _json_rows(text, path)


def _csv_rows(text: str, path: Path) -> list[Row]:
    """Return the rows of a CSV file as texts, without empty cells."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    try:
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"it has another number of cells than the first line, {len(reader.fieldnames or ())}")
            rows.append({name: value for name, value in row.items() if value})
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}, line {reader.reader.line_num} is not CSV: {error}") from None
    return rows


def _json_rows(text: str, path: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            check_depth(row)
            if not isinstance(row, dict):
                raise ValueError(f"it is a {type(row).__name__}")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number} is not a JSON object, one per line and nested at most {MAX_JSON_DEPTH} deep: "
                f"{reason(error)}"
            ) from None
        rows.append(row)
    return rows


def plain_rows(table: "pyarrow.Table") -> list[Row]:
    """Return the rows of a table as JSON values, without empty ones and those that JSON cannot hold, such as pictures.

    Raises ValueError, which names the row, for a value that Python cannot hold, such as a date after the year 9999.
    """
    rows: list[Row] = []
    for number, values in enumerate(zip(*table.columns, strict=True), start=1):
        try:
            row = {name: value.as_py() for name, value in zip(table.column_names, values, strict=True)}
            plain = json.loads(
                json.dumps(row, default=lambda value: str(value) if isinstance(value, date | time | Decimal) else None)
            )
        except Exception as error:
            raise ValueError(f"row {number}: {reason(error)}") from None
        rows.append({name: value for name, value in plain.items() if value is not None})
    return rows


def public_rows(source: str, config: str | None = None, split: str = "train") -> list[Row]:
    """Download a public data set of the Hugging Face hub. Raises ValueError."""
    return plain_rows(hub_table(source, config, split))


def hub_table(source: str, config: str | None, split: str) -> "pyarrow.Table":
    """Download a split of a data set of the Hugging Face hub. Raises ValueError."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        # The arrow format does not decode pictures and sounds.
        return load_dataset(source, config, split=split).with_format("arrow")[:]
    except Exception as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        text = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
        raise ValueError(
            f"the split '{split}' of '{source}' cannot be loaded: {text}; check the names, the network and, for a "
            "gated data set, its terms and the login of the hub, or use a local file"
        ) from None


def read_tasks(rows: Iterable[Row], source: Path | str, read: Callable[[Row, int], Task | None]) -> list[Task]:
    """Return what `read` makes of each row and its index, without None. Its ValueError gets the source and the row."""
    tasks = []
    for index, row in enumerate(rows):
        try:
            tasks.append(read(row, index))
        except ValueError as error:
            raise ValueError(f"{source}, row {index + 1}: {error}") from None
    return [task for task in tasks if task is not None]
