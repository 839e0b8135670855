"""How good a trained PRM is: its scores on tasks it never saw, on junk, and under changes that must not matter."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from reward.collected import outcome_of
from reward.junk import canaries
from reward.prm_quality import quality_report
from reward.prm_training import LabelledStep, PrmData
from reward.scored_steps import ScoredStep
from reward.step_text import StepText
from rollout.types import Trajectory

NUM_CANARY_CONTEXTS = 8

Score = Callable[[Sequence[StepText]], Sequence[float | None]]


def evaluate_prm(data: PrmData, trajectories: Iterable[Trajectory], *, score: Score, seed: int) -> dict[str, Any]:
    """The quality report on the held-out steps, `canaries` (the highest score of each junk decision over some
    held-out contexts) and `invariances` (the largest change of a score that should not change)."""
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    held_out = [one.step for one in data.held_out]
    scores = score(held_out)
    train = _scored_steps(data.train, [one.label for one in data.train], by_id)
    contexts = [step for step in held_out if step.step == 0][:NUM_CANARY_CONTEXTS]
    return {
        **quality_report(train, _scored_steps(data.held_out, scores, by_id), seed=seed),
        "canaries": _canary_scores(contexts, score),
        "num_unscored": sum(value is None for value in scores),
        "invariances": _invariances(held_out[:NUM_CANARY_CONTEXTS], scores, score),
    }


def _scored_steps(
    steps: Sequence[LabelledStep], scores: Sequence[float | None], trajectories: dict[str, Trajectory]
) -> list[ScoredStep]:
    return [
        _scored_step(one, score, trajectories[one.step.trajectory_id])
        for one, score in zip(steps, scores, strict=True)
        if score is not None
    ]


def _scored_step(one: LabelledStep, score: float, trajectory: Trajectory) -> ScoredStep:
    call = trajectory.planner_turns[one.step.step].tool_call
    return ScoredStep(
        task_id=one.step.task_id,
        group_id=trajectory.group_id,
        trajectory_id=trajectory.id,
        step=one.step.step,
        label=one.label,
        score=score,
        num_chars=len(one.step.decision),
        action=call.name if call else "malformed",
        outcome=outcome_of(trajectory),
        valid=one.step.valid,
    )


def _canary_scores(contexts: Sequence[StepText], score: Score) -> dict[str, float | None]:
    """None for a junk decision that got no score in any context."""
    found: dict[str, list[float]] = {}
    for context in contexts:
        junk = canaries(context)
        for name, value in zip(junk, score(list(junk.values())), strict=True):
            found.setdefault(name, []).extend([] if value is None else [value])
    return {name: max(values, default=None) for name, values in found.items()}


def _invariances(steps: Sequence[StepText], together: Sequence[float | None], score: Score) -> dict[str, float | None]:
    """`batch`: scored with others or alone. `own_result`: with another result of the step's own tool call."""
    changed = [replace(step, result="Result: something else\n") for step in steps]
    return {
        "batch": _largest_change(together, [score([step])[0] for step in steps]),
        "own_result": _largest_change(score(list(steps)), score(changed)),
    }


def _largest_change(left: Sequence[float | None], right: Sequence[float | None]) -> float | None:
    """None where nothing could be compared."""
    pairs = [(a, b) for a, b in zip(left, right, strict=False) if a is not None and b is not None]
    return max((abs(a - b) for a, b in pairs), default=None)
