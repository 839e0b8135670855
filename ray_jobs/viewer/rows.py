"""Readers of the logs of a run while they grow: metrics, states of groups, and the heads of trajectories."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from envs.types import Task
from rollout.codec import SchemaError, flat_record, trajectory_of
from rollout.records import read_json
from rollout.types import SCHEMA, Reward

Row = dict[str, Any]

_SHORT = 300
"""Characters of a text that a list or a cell shows."""


class LogRows:
    """The rows of metrics.jsonl or groups.jsonl in their order: the JSON objects that have `key`.

    A file that was replaced, for example by a resumed run, is read again from its start, and `generation` increases.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.generation = 0
        self._key = key
        self._inode: int | None = None
        self._reset()

    def _reset(self) -> None:
        self.rows: list[Row] = []
        self.num_unreadable = 0
        """Lines that are not such objects; a full disk tears lines."""
        self._end = 0

    def refresh(self) -> None:
        """Read the new complete lines."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if self._inode not in (None, stat.st_ino) or stat.st_size < self._end:
                self._reset()
                self.generation += 1
            self._inode = stat.st_ino
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if (row := self._row_of(line)) is None:
                    self.num_unreadable += 1
                else:
                    self.rows.append(row)
                self._end += len(line)

    def _row_of(self, line: bytes) -> Row | None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return row if isinstance(row, dict) and self._key in row else None


class _TurnHead(msgspec.Struct):
    role: str
    policy_version: int
    switches: tuple[tuple[int, int], ...] = ()
    advantage: float | None = None


class _TrajectoryHead(msgspec.Struct, tag_field="schema", tag=SCHEMA):
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


_decode_head = msgspec.json.Decoder(_TrajectoryHead).decode


class TrajectoryIndex(LogRows):
    """A short row for each trajectory of a file. Only heads are parsed, so 20,000 take well under a second."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "id")

    def _reset(self) -> None:
        super()._reset()
        self.texts: dict[str, str] = {}
        """What a search in each trajectory looks at."""
        self.by_group: dict[str, list[Row]] = {}
        """The attempts of each group that was sampled for training."""
        self._offsets: dict[str, int] = {}

    def record(self, trajectory_id: str) -> Row | None:
        """Read a whole trajectory from the file; None if the file has no complete one with this id."""
        if trajectory_id not in self._offsets:
            return None
        with self.path.open("rb") as file:
            file.seek(self._offsets[trajectory_id])
            try:
                trajectory = trajectory_of(file.readline())
            except SchemaError:
                return None
        # The run may have been rewound since the file was indexed.
        return flat_record(trajectory) if trajectory.id == trajectory_id else None

    def _row_of(self, line: bytes) -> Row | None:
        try:
            head = _decode_head(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        task = head.task
        planned = [turn for turn in head.turns if turn.role == "planner"]
        versions = {version for turn in planned for version in (turn.policy_version, *(at for _, at in turn.switches))}
        row = {
            "id": head.id,
            "group": head.group_id,
            "phase": head.phase,
            "step": head.step,
            "task": task.id,
            "dataset": task.dataset,
            "question": shortened(task.question),
            "answer": shortened(head.answer),
            "gold": shortened(task.answer),
            "outcome": head.reward.outcome if head.reward else None,
            "verdict": head.verdict,
            "turns": len(planned),
            "versions": [min(versions), max(versions)] if versions else None,
            "advantages": [turn.advantage for turn in planned] if head.credit else None,
        }
        texts = (head.id, task.id, task.dataset, task.question, head.answer, task.answer, head.stop_reason, head.reason)
        self.texts[head.id] = "\n".join(str(text or "")[:2000] for text in texts).lower()
        self._offsets[head.id] = self._end
        if head.phase == "train":
            self.by_group.setdefault(head.group_id, []).append(row)
        return row


def shortened(text: object) -> str | None:
    """Shorten a text for a list; an ellipsis marks the cut."""
    if text is None:
        return None
    whole = str(text)
    return whole if len(whole) <= _SHORT else f"{whole[: _SHORT - 1]}…"


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, and an empty one without the file. Raises RecordsError."""
    return read_json(path) if path.exists() else {}
