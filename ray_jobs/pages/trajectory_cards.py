"""Trajectories as cards to read: what the planner thought, did and was answered, and what each step was worth."""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
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
    """Of a trained group, one right and one wrong attempt with what the PRM said of each step; where some pairs part at
    steps of one action, the middle one of these by how far the PRM tells the two steps apart."""
    right, wrong = ([one for one in group if one["outcome"] == outcome] for outcome in (1.0, 0.0))
    if not right or not wrong:
        return "".join(_card("An attempt of the group", one) for one in group[:1])
    pairs = [(one, other) for one in right for other in wrong]
    gaps = [(gap, pair) for pair in pairs if (gap := _gap(*pair)) is not None]
    if not gaps:
        said = "No right and wrong attempt of this group part at two steps of one action: no step can be compared."
        pair = pairs[0]
    else:
        gaps.sort(key=lambda one: one[0])
        gap, pair = gaps[(len(gaps) - 1) // 2]
        higher = sum(one > 0 for one, _ in gaps)
        said = (
            f"{len(gaps)} pairs of a right and a wrong attempt of this group agree up to a step, and there take the "
            f"same action with another input. The right one's step scored higher in {higher} of them. Shown is the "
            f"middle pair: they part at step {_fork(*pair) + 1}, where the right one scored {abs(gap):.2f} "
            f"{'higher' if gap > 0 else 'lower'}."
        )
    titles = ("A right attempt", "A wrong sibling of the same group")
    return f'<p class="soft">{said}</p>' + "".join(map(_card, titles, pair))


def _gap(right: Record, wrong: Record) -> float | None:
    """The right attempt's score less the wrong one's where they part; None where they do not do the same with another
    input there, or a score is missing."""
    steps, fork = (_decisions(right), _decisions(wrong)), _fork(right, wrong)
    if fork >= min(map(len, steps)):
        return None
    (action, said, _), (other_action, other_said, _) = (side[fork] for side in steps)
    score, other_score = (one["prm_scores"][fork] for one in (right, wrong))
    if action is None or action != other_action or said == other_said or score is None or other_score is None:
        return None
    return float(score - other_score)


def _fork(one: Record, other: Record) -> int:
    """How many steps they share from the beginning, results included."""
    pairs = list(zip(_decisions(one), _decisions(other), strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _decisions(record: Record) -> list[tuple[Any, ...]]:
    """Action, input and result of each planner step; a malformed step is its text."""
    return [
        (turn["action"], turn["action_input"] or turn["text"], turn["result"])
        for turn in record["turns"]
        if turn["role"] == "planner"
    ]


def titled_cards(records: Mapping[str, Record]) -> str:
    """One card a title."""
    return "".join(_card(title, record) for title, record in records.items())


def _card(title: str, record: Record) -> str:
    right = record.get("outcome", record["reward"]) == 1
    advantages = record.get("advantages", ())
    same = record.get("same_steps") or [()] * len(advantages)
    worth = [_worth(*parts) for parts in zip(record.get("prm_scores", ()), advantages, same, strict=True)]
    turns = [turn for turn in record["turns"] if turn["role"] == "planner"] if worth else record["turns"]
    answer = record["answer"] if record["answer"] is not None else f"no answer ({record['stop_reason']})"
    return (
        f'<div class="card"><b>{escape(title)}</b><p>{escape(record["question"])}</p>'
        + "".join(map(_step, turns, worth or [""] * len(turns)))
        + f'<p>Answer: <b class="{"right" if right else "wrong"}">{escape(answer)}</b>, '
        f"the reference is {escape(record['gold'])}</p></div>"
    )


def _worth(score: float | None, advantage: float, same: Sequence[float]) -> str:
    said = "no PRM score" if score is None else f"PRM score {score:.2f}"
    shared = f"<br>{_shared(same)}" if len(same) > 1 else ""
    return f'<br><span class="soft">{said}, advantage {advantage:+.2f}{shared}</span>'


def _shared(advantages: Sequence[float]) -> str:
    counts = Counter(f"{one:+.2f}" for one in advantages).most_common()
    each = ", ".join(f"{value} ×{count}" for value, count in counts)
    mean = f"; mean {fmean(advantages):+.2f}" if len(counts) > 1 else ""
    return f"{len(advantages)} attempts made this very step in the same state: {each}{mean}"


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
