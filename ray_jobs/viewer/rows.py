"""Readers of the logs of a run while they grow: metrics, states of groups, and trajectories."""

import json
import os
from pathlib import Path
from typing import Any

from rollout.codec import SchemaError, flat_record, trajectory_of
from rollout.files import read_json

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


class TrajectoryIndex(LogRows):
    """A short row for each trajectory of a file. 20,000 are read in about a second."""

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
            one = trajectory_of(line)
        except SchemaError:
            return None
        task, turns = one.task, one.planner_turns
        versions = {version for turn in turns for version in (turn.policy_version, *(at for _, at in turn.switches))}
        row = {
            "id": one.id,
            "group": one.group_id,
            "phase": one.phase,
            "step": one.step,
            "task": task.id,
            "dataset": task.dataset,
            "question": shortened(task.question),
            "answer": shortened(one.answer),
            "gold": shortened(task.answer),
            "outcome": one.outcome,
            "verdict": one.verdict,
            "turns": len(turns),
            "versions": [min(versions), max(versions)] if versions else None,
            "advantages": [turn.advantage for turn in turns] if one.credit else None,
        }
        texts = (one.id, task.id, task.dataset, task.question, one.answer, task.answer, one.stop_reason, one.reason)
        self.texts[one.id] = "\n".join(str(text or "")[:2000] for text in texts).lower()
        self._offsets[one.id] = self._end
        if one.phase == "train":
            self.by_group.setdefault(one.group_id, []).append(row)
        return row


def shortened(text: object) -> str | None:
    """Shorten a text for a list; an ellipsis marks the cut."""
    if text is None:
        return None
    whole = str(text)
    return whole if len(whole) <= _SHORT else f"{whole[: _SHORT - 1]}…"


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, and an empty one without the file. Raises UserError."""
    return read_json(path) if path.exists() else {}
