"""What a train step leaves for the viewer: its groups, trajectory by trajectory, and where advantages came from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from configs.reward import Credit
from learner.types import StepResult
from reward.credit_parts import credit_parts
from reward.shared_steps import same_steps, scores_by_action
from reward.stored import scored_group_of
from reward.types import ScoredGroup
from rollout.buffer import Batch
from rollout.records import trajectory_record
from rollout.types import Trajectory

DIGITS = 6
"""Of learner log-probs, advantages and scores so many digits after the point are written."""


def step_records(batch: Batch, result: StepResult, *, credit: Credit, prm_weight: float) -> Iterator[dict[str, Any]]:
    """All groups of the step's batch, then those few without signal that the ledger kept bytes of."""
    for payload in batch.payloads:
        yield from _batch_records(scored_group_of(payload), batch, result, credit=credit, prm_weight=prm_weight)
    for verdict, reason, payload in batch.untrained:
        yield from _untrained_records(scored_group_of(payload), batch.step, verdict, reason)


def _batch_records(
    scored: ScoredGroup, batch: Batch, result: StepResult, *, credit: Credit, prm_weight: float
) -> Iterator[dict[str, Any]]:
    parts = credit_parts(scored, credit=credit, prm_weight=prm_weight)
    shared = _verdict(result) | {
        "credit": {
            "scheme": parts.scheme,
            "weight": parts.weight,
            "totals": asdict(parts.totals),
            "scores": asdict(parts.scores),
            "by_action": {
                action: asdict(spread) for action, spread in scores_by_action(scored, parts.step_rewards).items()
            },
        },
    }
    same = same_steps(scored, parts.advantages)
    for index, (trajectory, reward) in enumerate(zip(scored.group.trajectories, scored.rewards, strict=True)):
        more = shared | {
            "outcome": reward.outcome,
            "advantages": _rounded(parts.advantages[index]),
            "outcome_parts": _rounded(parts.outcomes[index]),
            "process_parts": _rounded(parts.processes[index]),
            "step_rewards": _rounded(parts.step_rewards[index]),
            "same_steps": [_rounded(values) for values in same[index]],
        }
        more |= _scores(scored, index)
        record = trajectory_record(trajectory, reward=reward.total, phase="train", step=batch.step, more=more)
        logprobs = result.learner_logprobs.get(trajectory.id)
        if logprobs is not None:
            _add_learner_logprobs(record, trajectory, logprobs, batch.version_ages)
        yield record


def _verdict(result: StepResult) -> dict[str, Any]:
    """What became of the batch: the version that it was trained into, or why the guard refused it."""
    if result.skipped is None:
        return {"verdict": "trained", "trained_as": result.policy_version}
    return {"verdict": "refused", "reason": result.skipped}


def _untrained_records(scored: ScoredGroup, step: int, verdict: str, reason: str) -> Iterator[dict[str, Any]]:
    for index, (trajectory, reward) in enumerate(zip(scored.group.trajectories, scored.rewards, strict=True)):
        more = {"verdict": verdict, "reason": reason, "outcome": reward.outcome} | _scores(scored, index)
        yield trajectory_record(trajectory, reward=reward.total, phase="train", step=step, more=more)


def _scores(scored: ScoredGroup, index: int) -> dict[str, Any]:
    """Of the trajectory at `index`; nothing for a group that no PRM has scored."""
    scores = scored.step_scores
    return {} if scores is None else {"prm_scores": list(scores.raw[index]), "prm_digest": scores.prm_digest}


def _add_learner_logprobs(
    record: dict[str, Any], trajectory: Trajectory, logprobs: np.ndarray, version_ages: Mapping[int, int]
) -> None:
    """Each trained token's, None at tokens that were not trained: too old, or not the planner's."""
    rest = iter(_rounded(logprobs.tolist()))
    for row, turn in zip(record["turns"], trajectory.turns, strict=True):
        if turn.role == "planner" and turn.trainable:
            trained = [version in version_ages for version in turn.completion.token_versions]
            row["learner_logprobs"] = [next(rest, None) if one else None for one in trained]


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, DIGITS) for value in values]
