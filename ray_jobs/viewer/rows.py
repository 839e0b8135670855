"""What a run writes, read beside it as it grows: metrics, the heads of trajectories, and what became of every group."""

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from rollout.records import head_of, readable
from rollout.store.ledger_file import LedgerMovedOnError, is_read_from_copy, readable_ledger
from rollout.store.lifecycle import group_id

Row = dict[str, Any]

CHUNK_LINES = 500
"""Other threads get a turn after so many lines."""

_SHORT = 300
"""A list or a cell shows so many characters of a text at most."""


class GrowingLines:
    """New whole lines of a file, from where the last reading ended. A file that was replaced, as by a resumed run, is
    read from its beginning: `generation` tells one reading of it from the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._inode: int | None = None
        self._end = 0

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes read, and bytes there are."""
        return self._end, max(self._end, self.path.stat().st_size if self.path.exists() else 0)

    def replaced(self) -> bool:
        """Whether the file must be read from its beginning; from then on it is."""
        if not self.path.exists():
            return False
        stat = self.path.stat()
        changed = self._inode is not None and (stat.st_ino != self._inode or stat.st_size < self._end)
        if changed:
            self._end, self.generation = 0, self.generation + 1
        self._inode = stat.st_ino
        return changed

    def new(self) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each line that is new."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                start = self._end
                self._end += len(line)
                yield start, line


class MetricRows:
    """The rows of metrics.jsonl. `num_unreadable` counts lines that are none."""

    def __init__(self, path: Path) -> None:
        self.lines = GrowingLines(path)
        self._forget()

    def _forget(self) -> None:
        self.rows: list[Row] = []
        self.num_unreadable = 0

    def refresh(self) -> None:
        if self.lines.replaced():
            self._forget()
        for _, line in self.lines.new():
            row = _readable(json.loads, line, "step")
            if row is None:
                self.num_unreadable += 1
            else:
                self.rows.append(row)


class TrajectoryIndex:
    """A short row for each trajectory of a file. Only heads are parsed, so 20,000 take well under a second. Whoever
    reads holds `lock`, which `refresh` lets go of again and again. `num_unreadable` counts lines that are none."""

    def __init__(self, path: Path) -> None:
        self.lines = GrowingLines(path)
        self.lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.rows: list[Row] = []
        self.texts: list[str] = []
        self.by_id: dict[str, int] = {}
        self.by_group: dict[str, list[int]] = {}
        self._offsets: list[int] = []
        self.num_unreadable = 0

    def refresh(self) -> None:
        more = True
        while more:
            with self.lock:
                if self.lines.replaced():
                    self._forget()
                lines = list(islice(self.lines.new(), CHUNK_LINES))
                for offset, line in lines:
                    self._add(offset, line)
            more = len(lines) == CHUNK_LINES
            # Whoever waits for the lock gets it.
            time.sleep(0.001)

    def record(self, trajectory_id: str) -> Row | None:
        """All of a trajectory, from the file; None for one that the file does not have, or not in full."""
        with self.lock:
            number = self.by_id.get(trajectory_id)
            if number is None:
                return None
            offset = self._offsets[number]
        with self.lines.path.open("rb") as file:
            file.seek(offset)
            record = _readable(lambda line: readable(json.loads(line)), file.readline(), "turns")
        # Between index and file a run may have been rewound.
        return record if record is not None and record.get("id") == trajectory_id else None

    def _add(self, offset: int, line: bytes) -> None:
        head = _readable(head_of, line, "id")
        if head is None:
            self.num_unreadable += 1
            return
        row = _row(head)
        number = len(self.rows)
        self._offsets.append(offset)
        self.texts.append(_searched(head))
        self.by_id[row["id"]] = number
        if row["phase"] == "train":
            self.by_group.setdefault(row["group"], []).append(number)
        self.rows.append(row)


def _readable(parse: Callable[[bytes], object], line: bytes, key: str) -> Row | None:
    """What `parse` makes of a line; None where that is no JSON object with `key`: a full disk tears lines."""
    try:
        value = parse(line)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    return value if isinstance(value, dict) and key in value else None


def _row(head: Mapping[str, Any]) -> Row:
    """What a list shows of a trajectory. A line of another program may lack some of it."""
    return {
        "id": str(head.get("id")),
        "group": str(head.get("group_id")),
        "phase": str(head.get("phase")),
        "step": head.get("step"),
        "task": str(head.get("task_id")),
        "dataset": head.get("dataset"),
        "question": shortened(head.get("question")),
        "answer": shortened(head.get("answer")),
        "gold": shortened(head.get("gold")),
        "outcome": head.get("outcome", head.get("reward")),
        "verdict": head.get("verdict", "trained" if head.get("phase") == "train" else None),
        "turns": head.get("num_turns"),
        "versions": head.get("versions"),
        "advantages": head.get("advantages"),
    }


def shortened(text: object) -> str | None:
    """For a list; the mark at its end says that it is cut."""
    said = None if text is None else str(text)
    return said if said is None or len(said) <= _SHORT else f"{said[: _SHORT - 1]}…"


def _searched(head: Mapping[str, Any]) -> str:
    names = ("id", "task_id", "dataset", "question", "answer", "gold", "stop_reason", "reason")
    return "\n".join(str(head.get(name) or "")[:2000] for name in names).lower()


COPY_EVERY_S = 30.0
"""Where the whole ledger is copied to be read, this is not done at every look."""

_COLUMNS = (
    "ordinal, task, family, repeats, state, attempt, step, reported_step, duration_s, num_tokens, versions, "
    "facts, reason"
)


class LedgerRows:
    """The groups in the order they were drawn; none where the run keeps no ledger. `version` counts readings, `error`
    says why the last one failed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._copied_at = float("-inf")
        self.rows: list[Row] = []
        self.version = 0
        self.error: str | None = None

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
        except LedgerMovedOnError:
            return
        except (sqlite3.DatabaseError, ValueError) as error:
            # What the run holds at this moment is read the next time, and so is what may be mended.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                self.error = str(error)
            return
        self._seen, self._copied_at, self.error = stamp, time.monotonic(), None
        self.version += 1


def _read(path: Path) -> list[sqlite3.Row]:
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1.0)) as db:
        db.row_factory = sqlite3.Row
        return list(db.execute(f"SELECT {_COLUMNS} FROM groups ORDER BY ordinal"))


def _group(row: sqlite3.Row) -> Row:
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
