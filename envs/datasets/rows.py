"""The rows of a data set, from a file or from the hub."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import reason

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSet:
    """Where the rows are published. A gated one needs its terms accepted, and a login of the hub."""

    id: str
    split: str
    config: str | None = None
    gated: bool = False


def local_rows(path: Path) -> list[Row]:
    """One JSON object a line, or the rows of a Parquet file. Raises ValueError for what is neither."""
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    rows = []
    # A mark of byte order, which some editors write, is no part of the first line.
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_object(line, f"{path}, line {number}"))
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
    return rows


def _parquet_rows(path: Path) -> list[Row]:
    import pyarrow
    from pyarrow.parquet import read_table

    try:
        return plain_rows(read_table(path))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {reason(error)}") from None


def plain_rows(table: "pyarrow.Table") -> list[Row]:
    """Values that JSON can hold: dates and decimals are texts. Empty values are left out, and other values, such as
    pictures, too."""
    return [
        {name: plain for name, value in row.items() if (plain := _plain(value)) is not None}
        for row in table.to_pylist()
    ]


def _plain(value: object) -> object:
    try:
        return json.loads(json.dumps(value, default=_as_text))
    except TypeError:
        return None


def _as_text(value: object) -> str:
    if isinstance(value, date | time | Decimal):
        return str(value)
    raise TypeError


def public_rows(source: PublicSet) -> list[Row]:
    """Downloaded through `datasets`, or taken from its cache. Raises ValueError where that is not possible."""
    from datasets import load_dataset

    try:
        return list(load_dataset(source.id, source.config, split=source.split))
    except Exception as error:
        gated = "; it is gated: accept its terms and log in to the hub first" if source.gated else ""
        raise ValueError(
            f"the public data set {source.id} could not be loaded ({type(error).__name__}){gated}; "
            "or give a folder with its file by --data"
        ) from error


def _object(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place} is no JSON object")
    return row
