"""The ledger of a run, read beside the run that writes it: what became of every group."""

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rollout.store.ledger_file import LedgerMovedOnError, is_read_from_copy, readable_ledger
from rollout.store.lifecycle import group_id

COPY_EVERY_S = 30.0
"""Where the whole ledger is copied to be read, this is not done at every look."""

_COLUMNS = (
    "ordinal, task, family, repeats, state, attempt, step, reported_step, duration_s, num_tokens, versions, "
    "facts, reason"
)


class LedgerRows:
    """The groups in the order they were drawn; none where the run keeps no ledger. `version` counts readings."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._copied_at = float("-inf")
        self.rows: list[dict[str, Any]] = []
        self.version = 0

    def refresh(self) -> None:
        stamp = tuple(
            file.stat().st_mtime_ns
            for file in (self._path, self._path.with_name(f"{self._path.name}-wal"))
            if file.exists()
        )
        if not stamp or stamp == self._seen:
            return
        if is_read_from_copy(self._path) and time.monotonic() - self._copied_at < COPY_EVERY_S:
            return
        try:
            with readable_ledger(self._path) as path:
                self.rows = [_group(row) for row in _read(path)]
        except (sqlite3.DatabaseError, LedgerMovedOnError):
            # The run holds it at this moment, or a copy of it is not whole; it is read the next time.
            return
        self._seen, self._copied_at = stamp, time.monotonic()
        self.version += 1


def _read(path: Path) -> list[sqlite3.Row]:
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1.0)) as db:
        db.row_factory = sqlite3.Row
        return list(db.execute(f"SELECT {_COLUMNS} FROM groups ORDER BY ordinal"))


def _group(row: sqlite3.Row) -> dict[str, Any]:
    facts = json.loads(row["facts"] or "{}")
    versions = sorted(map(int, json.loads(row["versions"] or "{}")))
    return {
        "id": group_id(row["ordinal"]),
        "task_number": row["task"],
        "family": row["family"],
        "repeats": row["repeats"],
        "state": row["state"],
        "attempt": row["attempt"],
        "step": row["step"] if row["step"] is not None else row["reported_step"],
        "duration_s": row["duration_s"],
        "tokens": row["num_tokens"],
        "versions": [versions[0], versions[-1]] if versions else None,
        "right": facts.get("right"),
        "scored": facts.get("scored"),
        "size": facts.get("trajectories"),
        # Of any other group it would tell why an earlier attempt came to nothing.
        "reason": row["reason"] if row["state"] in ("failed", "expired", "refused") else None,
    }
