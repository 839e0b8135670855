"""Readers of the logs of a run while they grow: metrics, the heads of trajectories, and the states of groups."""

import json
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from envs.types import Task
from rollout.codec import SchemaError, flat_record, trajectory_of
from rollout.types import SCHEMA, Reward

Row = dict[str, Any]

CHUNK_LINES = 500
"""Lines after which other threads get a turn."""

_SHORT = 300
"""Characters of a text that a list or a cell shows."""


class _TurnHead(msgspec.Struct):
    role: str
    policy_version: int
    switches: tuple[tuple[int, int], ...] = ()
    advantage: float | None = None


class TrajectoryHead(msgspec.Struct, tag_field="schema", tag=SCHEMA):
    """The part of a logged trajectory that lists show; the rest of the line is skipped."""

    id: str
    group_id: str
    task: Task
    turns: tuple[_TurnHead, ...]
    answer: str | None
    stop_reason: str
    reward: Reward | None = None
    credit: dict[str, Any] | None = None
    phase: str = "train"
    step: int | None = None
    verdict: str | None = None
    reason: str = ""

    @property
    def has_credit(self) -> bool:
        return self.credit is not None


_decode_head = msgspec.json.Decoder(TrajectoryHead).decode


class GrowingLines:
    """The new complete lines of a growing file. A file that was replaced, for example by a resumed run, is read again
    from its start, and `generation` increases."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._inode: int | None = None
        self._end = 0

    @property
    def progress(self) -> tuple[int, int]:
        """Return the bytes read and the size of the file."""
        return self._end, max(self._end, self.path.stat().st_size if self.path.exists() else 0)

    def replaced(self) -> bool:
        """Return whether the file was replaced; if so, start again at its beginning."""
        if not self.path.exists():
            return False
        stat = self.path.stat()
        changed = self._inode is not None and (stat.st_ino != self._inode or stat.st_size < self._end)
        if changed:
            self._end, self.generation = 0, self.generation + 1
        self._inode = stat.st_ino
        return changed

    def new(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the bytes of each new line."""
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


class LogRows:
    """The rows of metrics.jsonl or groups.jsonl in their order: the JSON objects that have `key`."""

    def __init__(self, path: Path, key: str) -> None:
        self.lines = GrowingLines(path)
        self._key = key
        self._reset()

    def _reset(self) -> None:
        self.rows: list[Row] = []
        self.num_unreadable = 0
        """Lines that are not such objects; a full disk tears lines."""

    def refresh(self) -> None:
        """Read the new lines."""
        if self.lines.replaced():
            self._reset()
        for _, line in self.lines.new():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and self._key in row:
                self.rows.append(row)
            else:
                self.num_unreadable += 1


class TrajectoryIndex:
    """A short row for each trajectory of a file. Only heads are parsed, so 20,000 take well under a second. Readers
    hold `lock`, which `refresh` releases after every chunk of lines. `num_unreadable` counts invalid lines."""

    def __init__(self, path: Path) -> None:
        self.lines = GrowingLines(path)
        self.lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
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
                    self._reset()
                lines = list(islice(self.lines.new(), CHUNK_LINES))
                for offset, line in lines:
                    self._add(offset, line)
            more = len(lines) == CHUNK_LINES
            # Let threads that wait for the lock run.
            time.sleep(0.001)

    def record(self, trajectory_id: str) -> Row | None:
        """Read a whole trajectory from the file; None if the file has no complete one with this id."""
        with self.lock:
            number = self.by_id.get(trajectory_id)
            if number is None:
                return None
            offset = self._offsets[number]
        with self.lines.path.open("rb") as file:
            file.seek(offset)
            try:
                trajectory = trajectory_of(file.readline())
            except SchemaError:
                return None
        # The run may have been rewound since the file was indexed.
        return flat_record(trajectory) if trajectory.id == trajectory_id else None

    def _add(self, offset: int, line: bytes) -> None:
        try:
            head = _decode_head(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.num_unreadable += 1
            return
        row = _row(head)
        number = len(self.rows)
        self._offsets.append(offset)
        task = head.task
        texts = (head.id, task.id, task.dataset, task.question, head.answer, task.answer, head.stop_reason, head.reason)
        self.texts.append("\n".join(str(text or "")[:2000] for text in texts).lower())
        self.by_id[row["id"]] = number
        if row["phase"] == "train":
            self.by_group.setdefault(row["group"], []).append(number)
        self.rows.append(row)


def _row(head: TrajectoryHead) -> Row:
    """Return what a list shows of a trajectory."""
    planned = [turn for turn in head.turns if turn.role == "planner"]
    versions = {version for turn in planned for version in (turn.policy_version, *(at for _, at in turn.switches))}
    return {
        "id": head.id,
        "group": head.group_id,
        "phase": head.phase,
        "step": head.step,
        "task": head.task.id,
        "dataset": head.task.dataset,
        "question": shortened(head.task.question),
        "answer": shortened(head.answer),
        "gold": shortened(head.task.answer),
        "outcome": head.reward.outcome if head.reward else None,
        "verdict": head.verdict,
        "turns": len(planned),
        "versions": [min(versions), max(versions)] if versions else None,
        "advantages": [turn.advantage for turn in planned] if head.has_credit else None,
    }


def shortened(text: object) -> str | None:
    """Shorten a text for a list; an ellipsis marks the cut."""
    if text is None:
        return None
    whole = str(text)
    return whole if len(whole) <= _SHORT else f"{whole[: _SHORT - 1]}…"
