"""A run folder for the viewer: pages of rows, whole trajectories, groups, and pairs of attempts."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from configs.errors import UserError
from ray_jobs.run.summary import held_out_rates
from ray_jobs.viewer.rows import LogRows, Row, TrajectoryIndex, read_json_if_there
from ray_jobs.viewer.tree import prefix_tree
from rollout.files import TOKENIZER
from rollout.filters import SOLVED

MAX_PROMPT_CHARS = 20_000
FRESH_S = 900.0
"""A run without a summary is live if its files changed within this many seconds."""

_SETTINGS = ("seed", "num_steps", "pipeline_depth", "max_staleness")
_FILTERS = ("phase", "verdict", "outcome", "dataset", "step")
_KINDS = {
    ("wrong", "right"): "gained",
    ("right", "wrong"): "lost",
    ("wrong", "wrong"): "both_wrong",
    ("right", "right"): "both_right",
}
"""Kinds of pairs by the outcomes of their attempts, in the order in which they are listed."""

Asked = Mapping[str, str]
"""Filters of a list, which must all hold, `text` to search for, and `order`; an empty one is none."""


class ViewedRun:
    """A reader of a run folder. Call `refresh` to read new data, and everything from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "trajectories.jsonl").exists() and not (folder / "config.json").exists():
            raise UserError(f"'{folder}' has no trajectories.jsonl and no config.json; give the folder of a run")
        self.folder = folder
        self.trajectories = TrajectoryIndex(folder / "trajectories.jsonl")
        self.metrics = LogRows(folder / "metrics.jsonl", "step")
        self.group_rows = LogRows(folder / "groups.jsonl", "id")
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
            "live": not (self.folder / "summary.json").exists() and time.time() - changed < FRESH_S,
        }

    def about(self) -> Row:
        """Return name, settings and results of the run, and the values of each filter with their numbers."""
        config, summary = (read_json_if_there(self.folder / name) for name in ("config.json", "summary.json"))
        report, rows = self.folder.resolve() / "report.html", self.trajectories.rows
        facets = {
            name: Counter(row[name] for row in rows if row[name] is not None)
            for name in ("phase", "verdict", "dataset")
        }
        return {
            "name": self.folder.resolve().name,
            "settings": {
                **{name: config.get(name) for name in _SETTINGS},
                "model": config.get("model", {}).get("path"),
                "credit": config.get("reward", {}).get("credit", {}).get("type"),
                "objective": config.get("learner", {}).get("loss", {}).get("type"),
            },
            **{name: summary.get(name) for name in ("verdict", "num_eval_tasks", "bottleneck")},
            "solved": {name: summary.get(f"solve_rate_{name}") for name in ("untouched", "before", "after")},
            "held_out": [asdict(rate) for rate in held_out_rates(summary) if rate.step is not None],
            "report": str(report) if report.exists() else None,
            "alarms": summary.get("alarms", []),
            "facets": facets | {"changed": len(self._changed())},
        }

    def page(self, asked: Asked, offset: int, limit: int) -> Row:
        """Return a page of the selected trajectories, and their total number.

        The phase `changed` are attempts after RL whose task had another outcome before, gained ones first.
        """
        rows = self._changed() if asked.get("phase") == "changed" else self.trajectories.rows
        wanted = {name: asked[name] for name in _FILTERS if asked.get(name)}
        if wanted.get("phase") in ("any", "changed"):
            del wanted["phase"]
        text = asked.get("text", "").lower().strip()
        found = [
            row
            for row in rows
            if text in self.trajectories.texts[row["id"]]
            and all(value == (_outcome(row) if name == "outcome" else str(row[name])) for name, value in wanted.items())
        ]
        return _page(found, asked, offset, limit)

    def trajectory(self, trajectory_id: str) -> Row | None:
        """Return a trajectory with the texts of its tokens, its siblings and the other attempts at its task."""
        record = self.trajectories.record(trajectory_id)
        if record is None:
            return None
        self._add_token_texts(record["turns"])
        others = (
            row for row in self.trajectories.rows if row["task"] == record["task_id"] and row["id"] != trajectory_id
        )
        siblings = self.trajectories.by_group.get(record["group_id"], []) if record["phase"] == "train" else []
        return {"record": record, "siblings": siblings, "attempts": list(islice(others, 50))}

    def groups(self, asked: Asked, offset: int, limit: int) -> Row:
        """Return a page of the selected groups, with the outcomes of their trajectories."""
        text, states, step = (asked.get(name, "").lower().strip() for name in ("text", "verdict", "step"))
        found = [
            group
            for group in map(self._with_attempts, self.group_rows.rows)
            if (not states or group["state"] in states.split(","))
            and step in ("", str(group["step"]))
            and text in " ".join(str(group[name]) for name in ("id", "family", "task", "question", "reason")).lower()
        ]
        return _page(found, asked, offset, limit)

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
        first = rows[0] if rows else dict.fromkeys(("question", "task", "dataset"))
        return group | {
            "question": first["question"],
            "task": first["task"],
            "family": group["family"] or first["dataset"],
            "outcomes": [row["outcome"] for row in rows],
        }

    def _changed(self) -> list[Row]:
        """Return the attempts after RL whose task had another outcome before, gained ones first."""
        pairs = paired(self.phase_attempts("eval_before"), self.phase_attempts("eval_after"))
        return [pair["right"] | {"before": pair["left"]} for pair in pairs if pair["kind"] in ("gained", "lost")]

    def _add_token_texts(self, turns: Iterable[Row]) -> None:
        """Replace the prompt's token ids in each turn by texts, if the run folder has a tokenizer.

        `pieces` are the texts of the sampled tokens, `prompt_text` is the new part of the prompt.
        """
        for turn in turns:
            prompt = turn.pop("prompt_token_ids")
            if self._tokenizer is not None:
                turn["pieces"] = _pieces(self._tokenizer, turn["token_ids"])
                turn["prompt_text"] = self._tokenizer.decode(prompt, skip_special_tokens=False)[:MAX_PROMPT_CHARS]

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        path = self.folder / TOKENIZER
        return Tokenizer.from_file(str(path)) if path.is_file() else None


def paired(left: Mapping[str, Row], right: Mapping[str, Row]) -> list[Row]:
    """Pair the scored attempts at the same tasks, sorted by kind and task.

    Another run may have another question under the same name, which is no pair.
    """
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


def _page(found: list[Row], asked: Asked, offset: int, limit: int) -> Row:
    rows = found[::-1] if asked.get("order") == "newest" else found
    return {"total": len(rows), "rows": rows[offset : offset + limit]}


def _pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token; a character of several tokens is that of the last of them."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    pieces = []
    for token in token_ids:
        try:
            pieces.append(stream.step(tokenizer, token) or "")
        except Exception:
            # Bytes that are no text, for which the library has no exception class.
            stream = DecodeStream(skip_special_tokens=False)
            pieces.append("\N{REPLACEMENT CHARACTER}")
    return pieces
