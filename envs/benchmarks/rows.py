"""Rows of a benchmark: from a local JSON Lines file, or from the public data set."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSet:
    """Where the rows are published. A gated one needs its terms accepted, and a login of the hub."""

    id: str
    split: str
    config: str | None = None
    gated: bool = False


def local_rows(path: Path) -> list[Row]:
    """One JSON object a line. Raises ValueError for a line that is none."""
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_object(line, f"{path}, line {number}"))
    return rows


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
