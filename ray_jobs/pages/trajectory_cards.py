"""Which trajectories a report shows: tasks that RL turned, and two attempts of one group that the PRM tells apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollout.filters import SOLVED
from rollout.records import StepRecord, TrajectoryRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedTasks:
    """How many tasks were attempted after RL, numbers of them by what RL changed, and the first of each kind by title:
    one that RL turned from wrong to right, both ways, and one that the trained policy still fails."""

    attempted: int
    gained: int
    lost: int
    failed: int
    cards: Mapping[str, TrajectoryRecord]


def turned_tasks(before: Mapping[str, TrajectoryRecord], after: Mapping[str, TrajectoryRecord]) -> TurnedTasks:
    """`before` and `after` are the attempts by task. What could not be scored is neither solved
    nor wrong."""
    gained = [id for id, one in after.items() if one["reward"] == SOLVED and _is_wrong(before.get(id, one))]
    failed = [id for id, one in after.items() if _is_wrong(one)]
    lost = sum(before[id]["reward"] == SOLVED for id in failed if id in before)
    cards = {"Before RL": before[gained[0]], "The same task after RL": after[gained[0]]} if gained else {}
    if failed:
        cards["A task the trained policy still fails"] = after[failed[0]]
    return TurnedTasks(attempted=len(after), gained=len(gained), lost=lost, failed=len(failed), cards=cards)


def _is_wrong(attempt: TrajectoryRecord) -> bool:
    return attempt["reward"] is not None and attempt["reward"] != SOLVED


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    """A right and a wrong attempt of one group, by title, or one attempt where the group has no pair.

    `gaps` are the differences of score, right less wrong, of all pairs that part at steps of one action; `gap` is that
    of the pair shown, None where there is no such pair. `fork` counts the steps that both share.
    """

    cards: Mapping[str, StepRecord]
    gaps: Sequence[float] = ()
    gap: float | None = None
    fork: int = 0


def scored_pair(group: Sequence[StepRecord]) -> ScoredPair:
    """Of the pairs that part at steps of one action, the middle one by its gap; else the first pair."""
    right = [one for one in group if one["outcome"] == SOLVED]
    wrong = [one for one in group if one["outcome"] not in (SOLVED, None)]
    if not right or not wrong:
        return ScoredPair(cards={"An attempt of the group": group[0]} if group else {})
    pairs = [(one, other) for one in right for other in wrong]
    found = [(gap, pair) for pair in pairs if (gap := _gap(*pair)) is not None]
    found.sort(key=lambda one: one[0])
    gap, pair = found[(len(found) - 1) // 2] if found else (None, pairs[0])
    cards = {"A right attempt": pair[0], "A wrong sibling of the same group": pair[1]}
    return ScoredPair(cards=cards, gaps=[gap for gap, _ in found], gap=gap, fork=_fork(*pair))


def _gap(right: StepRecord, wrong: StepRecord) -> float | None:
    """The right attempt's score less the wrong one's where they part; None where they do not do the same with another
    input there, or a score is missing."""
    steps, fork = (_decisions(right), _decisions(wrong)), _fork(right, wrong)
    if fork >= min(map(len, steps)):
        return None
    (action, said, _), (other_action, other_said, _) = (side[fork] for side in steps)
    score, other_score = (one["prm_scores"][fork] for one in (right, wrong))
    if action is None or action != other_action or said == other_said or score is None or other_score is None:
        return None
    return score - other_score


def _fork(one: StepRecord, other: StepRecord) -> int:
    """How many steps they share from the beginning, results included."""
    pairs = list(zip(_decisions(one), _decisions(other), strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


Decision: TypeAlias = tuple[str | None, str, str | None]


def _decisions(record: StepRecord) -> list[Decision]:
    """Action, input and result of each planner step; a malformed step is its text."""
    return [
        (turn["action"], turn["action_input"] or turn["text"], turn["result"])
        for turn in record["turns"]
        if turn["role"] == "planner"
    ]
