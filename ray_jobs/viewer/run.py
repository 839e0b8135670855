"""A run folder for the viewer: its growing logs, pages of rows, whole trajectories, groups, and pairs of attempts."""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from configs.errors import UserError, in_whole_letters
from envs.tools.guard import raised
from ray_jobs.run.summary import held_out_rates
from rollout.codec import flat_record, trajectory_of
from rollout.files import TOKENIZER, read_json
from rollout.filters import SOLVED
from rollout.lifecycle import GroupRow
from rollout.types import Trajectory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Row = dict[str, Any]

_log = logging.getLogger(__name__)

MAX_PAGE = 500
MAX_PROMPT_CHARS = 20_000
_MOVE = ("action", "action_input", "result", "tool_error", "format_error")
_KINDS = {
    ("wrong", "right"): "gained",
    ("right", "wrong"): "lost",
    ("wrong", "wrong"): "both_wrong",
    ("right", "right"): "both_right",
}
"""Kinds of pairs by the outcomes of their attempts, in the order in which they are listed."""

Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a request. All filters of a list must hold; an empty one is none."""

    run: Natural = 0
    id: str = ""
    offset: Natural = 0
    limit: Natural = 100
    order: str = ""
    text: str = ""
    phase: str = ""
    verdict: str = ""
    outcome: str = ""
    dataset: str = ""
    step: str = ""
    left: str = ""
    right: str = ""
    only: str = ""

    def finds(self, text: str) -> bool:
        """Return whether a text holds what is searched for."""
        return self.text.lower().strip() in text.lower()

    def page(self, found: Sequence[Row]) -> Row:
        """Return the part of a list, of at most MAX_PAGE rows, and the length of the whole."""
        rows = found[::-1] if self.order == "newest" else found
        return {"total": len(rows), "rows": rows[self.offset : self.offset + min(self.limit, MAX_PAGE)]}


class LogRows:
    """The rows of a log, of type `kind`; lines that are no such row are counted and left out.

    A file that was replaced or shortened, as by a resumed run, is read again, and `generation` increases.
    """

    def __init__(self, path: Path, kind: object) -> None:
        self.path = path
        self.generation = 0
        self._kind = kind
        self._inode: int | None = None
        self._reset()

    def _reset(self) -> None:
        self.rows: list[Row] = []
        self.num_unreadable = 0
        """Lines that are no such rows: a full disk tears lines, and a foreign file has others."""
        self._end = 0
        self._last = b""
        """The line before `_end`. A file that was shortened, and has grown since, has another one there."""

    def refresh(self) -> None:
        """Read the new complete lines."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            file.seek(self._end - len(self._last))
            if self._inode not in (None, stat.st_ino) or file.read(len(self._last)) != self._last:
                self._reset()
                self.generation += 1
            self._inode = stat.st_ino
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    row = self._row_of(line)
                    msgspec.json.encode(row)  # not every number and text that Python reads can be sent
                    self.rows.append(row)
                except Exception as error:  # what a damaged or foreign file holds may fail anywhere
                    _log.warning("%s: a line at byte %d is left out: %s", self.path, self._end, raised(error))
                    self.num_unreadable += 1
                self._end, self._last = self._end + len(line), line

    def _row_of(self, line: bytes) -> Row:
        row: Row = msgspec.to_builtins(msgspec.convert(in_whole_letters(json.loads(line)), self._kind))
        return row


class MetricRows(LogRows):
    """The rows of metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, dict[str, float | None])

    def _row_of(self, line: bytes) -> Row:
        row = super()._row_of(line)
        return row | {"step": msgspec.convert(row["step"], Natural, strict=False)}


class TrajectoryIndex(LogRows):
    """A short row for each trajectory of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Trajectory)

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
            trajectory = trajectory_of(file.readline())
        # The run may have been rewound since the file was indexed.
        return flat_record(trajectory) if trajectory.id == trajectory_id else None

    def _row_of(self, line: bytes) -> Row:
        one = trajectory_of(line)
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
        self.texts[one.id] = "\n".join(str(text or "")[:2000] for text in texts)
        self._offsets[one.id] = self._end
        if one.phase == "train":
            self.by_group.setdefault(one.group_id, []).append(row)
        return row


def shortened(text: object) -> str | None:
    """Shorten a text for a list or a cell to 300 characters; an ellipsis marks the cut."""
    whole = str(text)
    return None if text is None else whole if len(whole) <= 300 else f"{whole[:299]}…"


def read_json_if_there(path: Path) -> Row:
    """Return the JSON object in a file, and an empty one without the file. Raises UserError."""
    found: Any = in_whole_letters(read_json(path)) if path.exists() else {}
    return found


class ViewedRun:
    """A reader of a run folder. Call `refresh` to read new data, and everything from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "trajectories.jsonl").exists() and not (folder / "config.json").exists():
            raise UserError(f"'{folder}' has no trajectories.jsonl and no config.json; give the folder of a run")
        self.folder = folder
        self.trajectories = TrajectoryIndex(folder / "trajectories.jsonl")
        self.metrics = MetricRows(folder / "metrics.jsonl")
        self.group_rows = LogRows(folder / "groups.jsonl", GroupRow)
        self._logs = (self.metrics, self.group_rows, self.trajectories)

    def refresh(self) -> None:
        """Read the new lines of all logs."""
        for log in self._logs:
            log.refresh()

    def state(self) -> Row:
        """Return the counts by which a page knows what to fetch again."""
        changed = max((log.path.stat().st_mtime for log in self._logs if log.path.exists()), default=0.0)
        return {
            "generation": f"{self.trajectories.generation}.{self.metrics.generation}",
            "trajectories": len(self.trajectories.rows),
            "metrics": len(self.metrics.rows),
            "steps": max((row["step"] for row in self.metrics.rows if "policy/loss" in row), default=0),
            "num_groups": len(self.group_rows.rows),
            "groups": Counter(row["state"] for row in self.group_rows.rows),
            "unreadable": sum(log.num_unreadable for log in self._logs),
            "live": not (self.folder / "summary.json").exists() and time.time() - changed < 900.0,
        }

    def about(self) -> Row:
        """Return name, settings and results of the run, and the values of each filter with their numbers."""
        report, rows = self.folder.resolve() / "report.html", self.trajectories.rows
        facets = {
            name: Counter(row[name] for row in rows if row[name] is not None)
            for name in ("phase", "verdict", "dataset")
        }
        config, summary = (read_json_if_there(self.folder / name) for name in ("config.json", "summary.json"))
        return {
            "name": self.folder.resolve().name,
            "report": str(report) if report.exists() else None,
            "facets": facets | {"changed": len(self._changed())},
            "settings": {
                **{name: config.get(name) for name in ("seed", "num_steps", "pipeline_depth", "max_staleness")},
                "model": config.get("model", {}).get("path"),
                "credit": config.get("reward", {}).get("credit", {}).get("type"),
                "objective": config.get("learner", {}).get("loss", {}).get("type"),
            },
            **{name: summary.get(name) for name in ("verdict", "num_eval_tasks", "bottleneck")},
            "solved": {name: summary.get(f"solve_rate_{name}") for name in ("untouched", "before", "after")},
            "held_out": [asdict(rate) for rate in held_out_rates(summary) if rate.step is not None],
        }

    def page(self, asked: Asked) -> Row:
        """Return a page of the selected trajectories; the phase `changed` are those after RL whose outcome changed."""
        phase = "" if asked.phase in ("any", "changed") else asked.phase
        found = [
            row
            for row in (self._changed() if asked.phase == "changed" else self.trajectories.rows)
            if phase in ("", row["phase"])
            and asked.verdict in ("", row["verdict"])
            and asked.outcome in ("", _outcome(row))
            and asked.dataset in ("", row["dataset"])
            and asked.step in ("", str(row["step"]))
            and asked.finds(self.trajectories.texts[row["id"]])
        ]
        return asked.page(found)

    def trajectory(self, trajectory_id: str) -> Row | None:
        """Return a trajectory with the texts of its tokens, its siblings and the other attempts at its task."""
        record = self.trajectories.record(trajectory_id)
        if record is None:
            return None
        self._add_token_texts(record["turns"])
        same = (row for row in self.trajectories.rows if row["task"] == record["task_id"])
        others = islice((row for row in same if row["id"] != trajectory_id), 50)
        siblings = self.trajectories.by_group.get(record["group_id"], []) if record["phase"] == "train" else []
        return {"record": record, "siblings": siblings, "attempts": list(others)}

    def groups(self, asked: Asked) -> Row:
        """Return a page of the selected groups, with the outcomes of their trajectories."""
        found = [
            group
            for group in map(self._with_attempts, self.group_rows.rows)
            if (not asked.verdict or group["state"] in asked.verdict.split(","))
            and asked.step in ("", str(group["step"]))
            and asked.finds(" ".join(str(group[name]) for name in ("id", "family", "task", "question", "reason")))
        ]
        return asked.page(found)

    def group(self, group_id: str) -> Row | None:
        """Return a group with its siblings and their prefix tree."""
        row = next((row for row in self.group_rows.rows if row["id"] == group_id), None)
        if row is None:
            return None
        siblings = self.trajectories.by_group.get(group_id, [])
        records = [record for row in siblings if (record := self.trajectories.record(row["id"]))]
        whole = {name: records[0][name] for name in ("question", "gold")} if records else {}
        return self._with_attempts(row) | whole | {"siblings": siblings, "tree": prefix_tree(records)}

    def phase_attempts(self, phase: str) -> dict[str, Row]:
        """Return the attempts of an evaluation by their tasks."""
        return {row["task"]: row for row in self.trajectories.rows if row["phase"] == phase}

    def _with_attempts(self, group: Row) -> Row:
        rows = self.trajectories.by_group.get(group["id"], [])
        first = rows[0] if rows else dict.fromkeys(("question", "task"))
        return group | {
            "question": first["question"],
            "task": first["task"],
            "outcomes": [row["outcome"] for row in rows],
        }

    def _changed(self) -> list[Row]:
        """Return the attempts after RL whose task had another outcome before, gained ones first."""
        pairs = paired(self.phase_attempts("eval_before"), self.phase_attempts("eval_after"))
        return [pair["right"] | {"before": pair["left"]} for pair in pairs if pair["kind"] in ("gained", "lost")]

    def _add_token_texts(self, turns: Iterable[Row]) -> None:
        """Replace the prompt's token ids in each turn by its text, and add those of its tokens, if possible."""
        for turn in turns:
            prompt = turn.pop("prompt_token_ids")
            if self._tokenizer is not None:
                text = self._tokenizer.decode(prompt, skip_special_tokens=False)
                turn["pieces"] = _pieces(self._tokenizer, turn["token_ids"])
                turn["prompt_text"] = text[:MAX_PROMPT_CHARS]

    @cached_property
    def _tokenizer(self) -> "Tokenizer | None":
        from tokenizers import Tokenizer

        path = self.folder / TOKENIZER
        return Tokenizer.from_file(str(path)) if path.is_file() else None


def paired(left: Mapping[str, Row], right: Mapping[str, Row]) -> list[Row]:
    """Pair the scored attempts at the same tasks with the same question, sorted by kind and task."""
    pairs = []
    for task in left.keys() & right.keys():
        first, second = left[task], right[task]
        kind = _KINDS.get((_outcome(first), _outcome(second)))
        if kind and all(first[name] == second[name] for name in ("dataset", "question")):
            pairs.append({"task": task, "kind": kind, "left": first, "right": second})
    return sorted(pairs, key=lambda pair: (list(_KINDS.values()).index(pair["kind"]), pair["task"]))


def _outcome(row: Row) -> str:
    if row["outcome"] is None:
        return "unscored"
    return "right" if row["outcome"] == SOLVED else "wrong"


def _pieces(tokenizer: "Tokenizer", token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token; a character of several tokens is that of the last of them."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    pieces = []
    for token in token_ids:
        try:
            pieces.append(stream.step(tokenizer, token) or "")
        except Exception:  # bytes that are no text, for which the library has no exception class
            stream = DecodeStream(skip_special_tokens=False)
            pieces.append("\N{REPLACEMENT CHARACTER}")
    return pieces


def prefix_tree(records: Sequence[Row]) -> Row:
    """Return `order`, the ids of trajectory records from left to right, and `rows`, a list of cells for each step.

    A cell represents the attempts with the same decision and result after equal earlier steps. It has `first` and
    `span`, the columns that it covers, and an advantage and a PRM score for each of them; attempts that have ended are
    in no cell. The branch with the largest share of right attempts comes first.
    """
    right = {record["id"]: record["outcome"] == SOLVED for record in records}
    steps: dict[str, list[tuple[Any, ...]]] = {}
    for record in records:
        moves = [_move(turn) for turn in record["turns"] if turn["role"] == "planner"]
        worths = (chain(record.get(name) or (), repeat(None)) for name in ("advantages", "prm_scores"))
        steps[record["id"]] = list(zip(moves, *worths, strict=False))
    rows: list[list[Row]] = [[] for _ in range(max(map(len, steps.values()), default=0))]
    order: list[str] = []

    def place(members: Sequence[str], depth: int) -> None:
        branches: dict[tuple[str | None, ...], list[str]] = {}
        for one in members:
            branches.setdefault(steps[one][depth][0] if depth < len(steps[one]) else (), []).append(one)
        ranks = {move: -sum(right[one] for one in branch) / len(branch) for move, branch in branches.items()}
        for move, branch in sorted(branches.items(), key=lambda item: (ranks[item[0]], -len(item[1]))):
            first = len(order)
            if not move:
                order.extend(branch)
                continue
            cell: Row = dict(zip((*_MOVE, "said"), map(shortened, move), strict=True))
            rows[depth].append(cell)
            place(branch, depth + 1)
            _, advantages, scores = zip(*(steps[one][depth] for one in order[first:]), strict=True)
            cell |= {"first": first, "span": len(branch), "advantages": advantages, "scores": scores}

    place(list(steps), 0)
    return {"order": order, "rows": rows}


def _move(turn: Row) -> tuple[str | None, ...]:
    # A malformed turn has no decision: only equal texts are equal moves.
    return *(turn[name] for name in _MOVE), turn["text"] if turn["action"] is None else None
