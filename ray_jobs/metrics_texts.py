"""Two trajectories of a train step as Markdown: one that was right and one that was wrong, step by step.

What models and tools wrote is hostile. It is written as numbered character references, which Markdown and HTML read as
plain characters: it can be no link, no image, no tag, no table cell of its own, and no end of the place it stands in.
"""

import unicodedata
from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

TEXTS: Mapping[str, str] = {
    "trajectories/right": "The first right trajectory of the step's first group, with what each decision was worth",
    "trajectories/wrong": "The first wrong trajectory of the same group",
}
"""Every text with one line on what it shows."""

MAX_CHARS = 600
"""Of one piece of text."""
MAX_TURNS = 40

_HEADER = "| step | decision | result | PRM score | advantage |\n| --- | --- | --- | --- | --- |"


class StepTexts:
    """Looks at the records of one step, one by one, and keeps two of them."""

    def __init__(self) -> None:
        self._kept: dict[str, Record] = {}

    def add(self, record: Record) -> None:
        if record.get("verdict") == "trained":
            self._look_at(record)

    def texts(self) -> dict[str, str]:
        """Markdown by the names of `TEXTS`."""
        return {name: markdown_of(record) for name, record in self._kept.items()}

    def _look_at(self, record: Record) -> None:
        groups = {one["group_id"] for one in self._kept.values()}
        if record["outcome"] is not None and groups <= {record["group_id"]}:
            name = "trajectories/right" if record["outcome"] == 1.0 else "trajectories/wrong"
            self._kept.setdefault(name, record)


def markdown_of(record: Record) -> str:
    """A trajectory as a table: a row for each planner turn."""
    turns = [turn for turn in record["turns"] if turn["role"] == "planner"]
    scores = record.get("prm_scores") or [None] * len(turns)
    rows = [
        f"| {number} | {_decision(turn)} | {_result(turn)} | {_number(score)} | {_number(advantage, signed=True)} |"
        for number, (turn, score, advantage) in enumerate(zip(turns, scores, record["advantages"], strict=True), 1)
    ]
    if len(rows) > MAX_TURNS:
        rows[MAX_TURNS:] = [f"| ... | {len(rows) - MAX_TURNS} more steps | | | |"]
    answer = "none" if record["answer"] is None else plain(record["answer"])
    return "\n".join(
        (
            f"**Task** {plain(record['question'])}\n",
            f"**Answer** {answer} ({plain(record['stop_reason'])}); the reference is {plain(record['gold'])}; "
            f"reward {_number(record['reward'])}\n",
            _HEADER,
            *rows,
        )
    )


def plain(text: str) -> str:
    """Any text as Markdown that shows its characters and means nothing else. What cannot be seen, and what turns the
    direction of reading, is shown by its number."""
    cut = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ... ({len(text)} characters)"
    return "".join(map(_shown, cut))


def _shown(character: str) -> str:
    if character.isalnum() or character == " ":
        return character
    if character == "\n":
        return "<br>"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"&#91;U+{ord(character):04X}&#93;"
    return f"&#{ord(character)};"


def _decision(turn: Record) -> str:
    if turn["format_error"]:
        return f"malformed: {plain(turn['format_error'])}<br>{plain(turn['text'])}"
    thought = f"{plain(turn['thought'])}<br>" if turn["thought"] else ""
    return f"{thought}**{plain(turn['action'] or 'nothing')}** {plain(turn['action_input'] or '')}"


def _result(turn: Record) -> str:
    if turn["tool_error"]:
        return f"error: {plain(turn['tool_error'])}"
    return plain(turn["result"] or "")


def _number(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{value:+.2f}" if signed else f"{value:.2f}"
