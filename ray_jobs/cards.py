"""Trajectories as cards to read: what the planner thought, did and was answered, and what each step was worth."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Record = Mapping[str, Any]


def trajectory_cards(attempts: Mapping[str, Mapping[str, Record]]) -> str:
    """A task that RL turned from wrong to right, both ways, and one that the trained policy still fails."""
    before, after = attempts["eval_before"], attempts["eval_after"]
    turned = [id for id, one in after.items() if one["reward"] == 1 and before.get(id, one)["reward"] == 0]
    failed = [id for id, one in after.items() if one["reward"] == 0]
    lost = sum(before[id]["reward"] == 1 for id in failed if id in before)
    cards = ""
    if turned:
        cards += _card("Before RL", before[turned[0]]) + _card("The same task after RL", after[turned[0]])
    if failed:
        cards += _card("A task the trained policy still fails", after[failed[0]])
    note = (
        f"RL turned {len(turned)} tasks from wrong to right and {lost} from right to wrong; {len(failed)} are wrong "
        "after it. Shown is the first of each kind."
    )
    return f'<p class="soft">{note}</p>{cards}' if cards else "<p>No trajectories were recorded.</p>"


def scored_cards(group: Sequence[Record]) -> str:
    """Of a trained group, one right and one wrong trajectory, with what the PRM said of each step."""
    chosen = {record["outcome"]: record for record in reversed(group)}
    titles = {1.0: "A right sibling", 0.0: "A wrong sibling of the same group"}
    return "".join(_card(title, chosen[outcome]) for outcome, title in titles.items() if outcome in chosen)


def titled_cards(records: Mapping[str, Record]) -> str:
    """One card a title."""
    return "".join(_card(title, record) for title, record in records.items())


def _card(title: str, record: Record) -> str:
    right = record.get("outcome", record["reward"]) == 1
    worth = [_worth(*pair) for pair in zip(record.get("prm_scores", ()), record.get("advantages", ()), strict=True)]
    turns = [turn for turn in record["turns"] if turn["role"] == "planner"] if worth else record["turns"]
    answer = record["answer"] if record["answer"] is not None else f"no answer ({record['stop_reason']})"
    return (
        f'<div class="card"><b>{escape(title)}</b><p>{escape(record["question"])}</p>'
        + "".join(map(_step, turns, worth or [""] * len(turns)))
        + f'<p>Answer: <b class="{"right" if right else "wrong"}">{escape(answer)}</b>, '
        f"the reference is {escape(record['gold'])}</p></div>"
    )


def _worth(score: float | None, advantage: float) -> str:
    said = "no PRM score" if score is None else f"PRM score {score:.2f}"
    return f'<br><span class="soft">{said}, advantage {advantage:+.2f}</span>'


def _step(turn: Record, worth: str) -> str:
    if turn["format_error"]:
        reason, text = escape(turn["format_error"]), escape(turn["text"])
        return f'<div class="step"><span class="wrong">malformed</span>: {reason}<br><code>{text}</code>{worth}</div>'
    thought = f'<span class="soft">{escape(turn["thought"])}</span><br>' if turn["thought"] else ""
    error = f'<span class="wrong">{escape(turn["tool_error"])}</span> ' if turn["tool_error"] else ""
    echo = turn["action"] in ("answer", "think")
    result = "" if echo else f'<br>&rarr; {error}<span class="result">{escape(turn["result"] or "")}</span>'
    return (
        f'<div class="step">{thought}<span class="action">{escape(turn["action"] or turn["role"])}</span> '
        f"<code>{escape(turn['action_input'] or turn['text'])}</code>{result}{worth}</div>"
    )
