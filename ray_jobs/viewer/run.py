"""A run folder for the viewer: pages of rows, whole trajectories, groups, and changes since the last refresh."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from configs.errors import UserError
from ray_jobs.run.summary import rates_by_step
from ray_jobs.viewer.rows import LogRows, Row, TrajectoryIndex
from ray_jobs.viewer.tree import prefix_tree
from rollout.filters import SOLVED
from rollout.records import TOKENIZER

MAX_PAGE = 500
MAX_PROMPT_CHARS = 20_000
FRESH_S = 900.0
"""A run without a summary is live if its files changed within this many seconds."""

_SETTINGS = ("seed", "num_steps", "pipeline_depth", "max_staleness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Filters of rows, which must all hold."""

    text: str = ""
    """Searched in ids, question and answers."""
    phase: str = ""
    """Also `any`, or `changed`: attempts after RL whose task had another outcome before, gained ones first."""
    verdict: str = ""
    outcome: str = ""
    dataset: str = ""
    step: int | None = None
    newest_first: bool = False


class ViewedRun:
    """A reader of a run folder. One thread calls `refresh`, which reads new data."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "trajectories.jsonl").exists() and not (folder / "config.json").exists():
            raise UserError(f"'{folder}' has no trajectories.jsonl and no config.json; give the folder of a run")
        self.folder = folder
        self.trajectories = TrajectoryIndex(folder / "trajectories.jsonl")
        self.metrics = LogRows(folder / "metrics.jsonl", "step")
        self.group_rows = LogRows(folder / "groups.jsonl", "id")
        self._tokens = TokenTexts(folder)

    def refresh(self) -> None:
        self.metrics.refresh()
        self.group_rows.refresh()
        self.trajectories.refresh()

    def state(self) -> Row:
        """Return the counts by which a page knows what to fetch again."""
        index = self.trajectories
        read, there = index.lines.progress
        files = [self.folder / name for name in ("metrics.jsonl", "trajectories.jsonl", "groups.jsonl")]
        changed = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
        return {
            "generation": f"{index.lines.generation}.{self.metrics.lines.generation}",
            "trajectories": len(index.rows),
            "metrics": len(self.metrics.rows),
            "steps": max((row["step"] for row in self.metrics.rows if "policy/loss" in row), default=0),
            "num_groups": len(self.group_rows.rows),
            "groups": dict(Counter(row["state"] for row in self.group_rows.rows)),
            "read": read / there if there else 1.0,
            "unreadable": index.num_unreadable + self.metrics.num_unreadable + self.group_rows.num_unreadable,
            "live": not (self.folder / "summary.json").exists() and time.time() - changed < FRESH_S,
        }

    def about(self) -> Row:
        """Return name, settings and results of the run."""
        config, summary = (_json(self.folder / name) for name in ("config.json", "summary.json"))
        reward, learner = (config.get(name, {}) for name in ("reward", "learner"))
        return {
            "name": self.folder.resolve().name,
            "settings": {
                **{name: config.get(name) for name in _SETTINGS},
                "model": config.get("model", {}).get("path"),
                "credit": reward.get("credit", {}).get("type"),
                "objective": learner.get("loss", {}).get("type"),
            },
            "verdict": summary.get("verdict"),
            "solved": {name: summary.get(f"solve_rate_{name}") for name in ("untouched", "before", "after")},
            "num_eval_tasks": summary.get("num_eval_tasks"),
            "held_out": [asdict(rate) for _, rate in rates_by_step(summary)],
            "report": str(report) if (report := self.folder.resolve() / "report.html").exists() else None,
            "alarms": summary.get("alarms", []),
            "bottleneck": summary.get("bottleneck"),
        }

    def facets(self) -> Row:
        """Return the values of each filter with their numbers of trajectories."""
        names = ("phase", "verdict", "dataset")
        with self.trajectories.lock:
            rows = self.trajectories.rows
            found: Row = {name: dict(Counter(row[name] for row in rows if row[name] is not None)) for name in names}
            return found | {"changed": len(self._changed())}

    def page(self, wanted: Wanted, offset: int, limit: int) -> Row:
        """Return a page of the selected trajectories, and their total number."""
        with self.trajectories.lock:
            found = self._found(wanted)
            if wanted.newest_first:
                found = found[::-1]
            rows = self.trajectories.rows
            before = {after: rows[number] for number, after in self._changed()} if wanted.phase == "changed" else {}
            shown = [
                rows[number] | ({"before": before[number]} if number in before else {})
                for number in found[offset : offset + limit]
            ]
            return {"total": len(found), "rows": shown}

    def trajectory(self, trajectory_id: str) -> Row | None:
        """Return a trajectory with the texts of its tokens, its siblings and the other attempts at its task."""
        record = self.trajectories.record(trajectory_id)
        if record is None:
            return None
        self._tokens.add_to(record)
        index = self.trajectories
        with index.lock:
            siblings = index.by_group.get(record["group_id"], []) if record["phase"] == "train" else []
            others = (row for row in index.rows if row["task"] == record["task_id"] and row["id"] != trajectory_id)
            return {
                "record": record,
                "siblings": [index.rows[number] for number in siblings],
                "attempts": list(islice(others, 50)),
            }

    def phase_attempts(self, phase: str) -> dict[str, Row]:
        """Return the attempts of an evaluation by their tasks."""
        with self.trajectories.lock:
            return {row["task"]: row for row in self.trajectories.rows if row["phase"] == phase}

    def groups(self, wanted: Wanted, offset: int, limit: int) -> Row:
        """Return a page of the selected groups, with the outcomes of their trajectories."""
        text, states, names = (
            wanted.text.lower().strip(),
            wanted.verdict,
            ("id", "family", "task", "question", "reason"),
        )
        with self.trajectories.lock:
            found = [
                group
                for group in self._all_groups()
                if (not states or group["state"] in states.split(","))
                and (wanted.step is None or group["step"] == wanted.step)
                and text in " ".join(str(group.get(name) or "") for name in names).lower()
            ]
        if wanted.newest_first:
            found.reverse()
        return {"total": len(found), "rows": found[offset : offset + limit]}

    def group(self, group_id: str) -> Row | None:
        index = self.trajectories
        with index.lock:
            group = next((group for group in self._all_groups() if group["id"] == group_id), None)
            siblings = [index.rows[number] for number in index.by_group.get(group_id, [])]
        if group is None:
            return None
        found = (self.trajectories.record(row["id"]) for row in siblings)
        records = [record for record in found if record is not None]
        whole = {name: records[0][name] for name in ("question", "gold")} if records else {}
        return group | whole | {"siblings": siblings, "tree": prefix_tree(records)}

    def _all_groups(self) -> Iterator[Row]:
        index = self.trajectories
        known = {group["id"] for group in self.group_rows.rows}
        others = (
            {"id": group_id, "state": index.rows[numbers[0]]["verdict"], "step": index.rows[numbers[0]]["step"]}
            for group_id, numbers in index.by_group.items()
            if group_id not in known
        )
        for group in chain(self.group_rows.rows, others):
            rows = [index.rows[number] for number in index.by_group.get(group["id"], [])]
            yield group | {
                "family": group.get("family") or (rows[0]["dataset"] if rows else None),
                "question": rows[0]["question"] if rows else None,
                "task": rows[0]["task"] if rows else None,
                "outcomes": [row["outcome"] for row in rows],
            }

    def _found(self, wanted: Wanted) -> Sequence[int]:
        """Return the numbers of the selected trajectories; the caller holds the lock."""
        index = self.trajectories
        fits = _fits(wanted)
        text = wanted.text.lower().strip()
        changed = wanted.phase == "changed"
        if not fits and not text and not changed:
            return range(len(index.rows))
        return [
            number
            for number in ([after for _, after in self._changed()] if changed else range(len(index.rows)))
            if (not text or text in index.texts[number]) and all(test(index.rows[number]) for test in fits)
        ]

    def _changed(self) -> list[tuple[int, int]]:
        """Return the numbers of the attempts before and after RL at tasks with a changed outcome, gained tasks first.

        The caller holds the lock.
        """
        rows = self.trajectories.rows
        before = {row["task"]: number for number, row in enumerate(rows) if row["phase"] == "eval_before"}
        pairs = [
            (before[row["task"]], number)
            for number, row in enumerate(rows)
            if row["phase"] == "eval_after" and row["task"] in before
        ]
        changed = [(first, after) for first, after in pairs if _kind(rows[first], rows[after]) in ("gained", "lost")]
        return sorted(changed, key=lambda pair: _right(rows[pair[0]]))


class TokenTexts:
    """The tokenizer in a run folder. Without one, tokens have no texts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add_to(self, record: dict[str, Any]) -> None:
        """Replace the prompt's token ids in each turn by texts.

        `pieces` are the texts of the sampled tokens, `prompt_text` is the new part of the prompt.
        """
        for turn in record["turns"]:
            prompt = turn.pop("prompt_token_ids", [])
            if self._tokenizer is not None:
                turn["pieces"] = self._pieces(turn["token_ids"])
                turn["prompt_text"] = self._tokenizer.decode(prompt, skip_special_tokens=False)[:MAX_PROMPT_CHARS]

    def _pieces(self, token_ids: Sequence[int]) -> list[str]:
        # A character of several tokens is shown at the last of them.
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        pieces = []
        for token in token_ids:
            try:
                pieces.append(stream.step(self._tokenizer, token) or "")
            except Exception:
                # Bytes that are no text, for which the library has no exception class.
                stream = DecodeStream(skip_special_tokens=False)
                pieces.append("\N{REPLACEMENT CHARACTER}")
        return pieces

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        path = self._folder / TOKENIZER
        return Tokenizer.from_file(str(path)) if path.is_file() else None


def paired(left: Mapping[str, Row], right: Mapping[str, Row], only: str, text: str) -> tuple[Row, Sequence[Row]]:
    """Pair attempts at the same tasks: the number of each kind, and the selected pairs.

    Another run may have another question under the same name, which is no pair. `only` is a kind of pair, or empty
    for all; `text` is searched in question and task.
    """
    counts, pairs = Counter[str](), []
    for task in left.keys() & right.keys():
        first, second = left[task], right[task]
        if any(first[name] != second[name] for name in ("dataset", "question")):
            continue
        kind = _kind(first, second)
        if kind == "unscored":
            continue
        counts[kind] += 1
        if only in ("", kind) and text in f"{task}\n{first['question']}".lower():
            pairs.append({"task": task, "kind": kind, "left": first, "right": second})
    order = ("gained", "lost", "both_wrong", "both_right")
    pairs.sort(key=lambda pair: (order.index(pair["kind"]), pair["task"]))
    return dict(counts), pairs


def _right(row: Row) -> bool:
    return row["outcome"] == SOLVED


def _kind(before: Row, after: Row) -> str:
    if None in (before["outcome"], after["outcome"]):
        return "unscored"
    if _right(before) == _right(after):
        return "both_right" if _right(before) else "both_wrong"
    return "gained" if _right(after) else "lost"


def _fits(wanted: Wanted) -> list[Callable[[Row], bool]]:
    tests: list[Callable[[Row], bool]] = []
    for name in ("phase", "verdict", "dataset", "step"):
        value = getattr(wanted, name)
        if value not in ("", None) and (name, value) not in (("phase", "any"), ("phase", "changed")):
            tests.append(lambda row, name=name, value=value: row[name] == value)  # type: ignore[misc]
    match wanted.outcome:
        case "right":
            tests.append(_right)
        case "wrong":
            tests.append(lambda row: row["outcome"] is not None and not _right(row))
        case "unscored":
            tests.append(lambda row: row["outcome"] is None)
    return tests


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
