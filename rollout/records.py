"""JSON files: one object per file, or one object per line."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.errors import UserError
from rollout.files import named

TOKENIZER = "tokenizer.json"
"""Copy of the model's tokenizer in a run folder, with which the token ids of its trajectories can be read."""


def line_of(record: Mapping[str, object]) -> bytes:
    """Return a record as one line of JSON. Half a surrogate pair, which a model may write, becomes a question mark."""
    return json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n"


def append_record(path: Path, record: Mapping[str, object]) -> None:
    """Append one line to a file. Raises OSError, which names the file."""
    append_line(path, line_of(record))


def append_line(path: Path, line: bytes) -> None:
    """Append a line, flushed before this returns, after removing a last line that a crash cut off. Raises OSError."""
    with named(path), path.open("ab+") as file:
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read(size).rfind(b"\n") + 1)
        file.write(line)


def read_records(path: Path) -> Iterator[Any]:
    """Yield the records of a file; a last line that a crash cut off is left out. Raises UserError."""
    for number, line in enumerate(whole_lines(path), start=1):
        yield _object_of(line, f"'{path}', line {number},")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError."""
    return _object_of(path.read_bytes(), f"'{path}'")


def _object_of(text: bytes, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{place} is not a JSON object: it was damaged after it was written; restore it from a copy")
    return found


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; a last line that a crash cut off is left out."""
    with path.open("rb") as lines:
        yield from (line for line in lines if line.endswith(b"\n"))
