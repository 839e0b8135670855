"""What a train step leaves for the viewer: its groups, trajectory by trajectory, and where advantages came from."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import ray

from learner.types import sample_name
from reward.credit import CreditedStep, same_steps, scores_by_action
from reward.stored import scored_group_of
from reward.types import ScoredGroup
from rollout.buffer import Batch
from rollout.numbers import packed_millionths
from rollout.records import trajectory_record
from rollout.types import Trajectory

DIGITS = 6
"""Of advantages and scores so many digits after the point are written."""


class StoredGroups(Iterable[ScoredGroup]):
    """The groups that a reference to their bytes stands for: fetched and parsed in a thread, from the moment that this
    is made, while the learner trains on them. Who asks for them waits until that is done."""

    def __init__(self, payloads: Any) -> None:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="groups")
        self._groups = thread.submit(lambda: tuple(map(scored_group_of, ray.get(payloads))))
        thread.shutdown(wait=False)

    def __iter__(self) -> Iterator[ScoredGroup]:
        return iter(self._groups.result())


def step_records(batch: Batch, groups: Iterable[ScoredGroup], result: CreditedStep) -> Iterator[dict[str, Any]]:
    """All groups of the step's batch, with the credit that the learner gave, then those few without signal that the
    ledger kept bytes of."""
    for scored in groups:
        yield from _batch_records(scored, batch, result)
    for verdict, reason, payload in batch.untrained:
        yield from _untrained_records(scored_group_of(payload), batch.step, verdict, reason)


def _batch_records(scored: ScoredGroup, batch: Batch, result: CreditedStep) -> Iterator[dict[str, Any]]:
    parts = result.credit[scored.group.id]
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
    if scored.anchor is not None:
        shared["anchor"] = asdict(scored.anchor)
    same = same_steps(scored, parts.advantages)
    for index, trajectory in enumerate(scored.group.trajectories):
        more = shared | {
            "outcome": scored.rewards[index].outcome,
            "advantages": _rounded(parts.advantages[index]),
            "outcome_parts": _rounded(parts.outcomes[index]),
            "process_parts": _rounded(parts.processes[index]),
            "step_rewards": _rounded(parts.step_rewards[index]),
            "same_steps": [_rounded(values) for values in same[index]],
        }
        record = _record(scored, index, batch.step, more)
        own = iter(_planner_logprobs(trajectory, result.learner_logprobs, batch))
        for turn, made in zip(record["turns"], trajectory.turns, strict=True):
            if made.role == "planner" and (values := next(own)) is not None:
                turn["learner_logprobs"] = packed_millionths(values)
        yield record
    if scored.roots is not None:
        yield from _untrained_records(scored.roots, batch.step, "all_wrong", "forks are trained on in its place")


def _untrained_records(scored: ScoredGroup, step: int, verdict: str, reason: str) -> Iterator[dict[str, Any]]:
    for index, reward in enumerate(scored.rewards):
        yield _record(scored, index, step, {"verdict": verdict, "reason": reason, "outcome": reward.outcome})


def _record(scored: ScoredGroup, index: int, step: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """Of the trajectory at `index`, with the PRM's scores where it has some."""
    scores, trajectory = scored.step_scores, scored.group.trajectories[index]
    judged = {} if scores is None else {"prm_scores": list(scores.raw[index]), "prm_digest": scores.prm_digest}
    return trajectory_record(
        trajectory,
        reward=scored.rewards[index].total,
        phase="train",
        step=step,
        more={**more, **judged},
        exact=False,
    )


def _planner_logprobs(
    trajectory: Trajectory, logprobs: Mapping[str, np.ndarray], batch: Batch
) -> list[np.ndarray | None]:
    """The learner's for each planner turn, nan at tokens that were not trained: too old. None for turns of which none
    was."""
    turns = trajectory.planner_turns
    found: list[np.ndarray | None] = [None] * len(turns)
    for branch, numbers in enumerate(trajectory.branches):
        own = logprobs.get(sample_name(trajectory.id, branch))
        if own is None:
            continue
        for number in (number for number in numbers if turns[number].trainable):
            versions = turns[number].completion.token_versions
            trained = np.flatnonzero([version in batch.version_ages for version in versions])
            values = found[number] = np.full(len(versions), np.nan)
            here, own = own[: len(trained)], own[len(trained) :]
            values[trained[: len(here)]] = here
    return found


def _verdict(result: CreditedStep) -> dict[str, Any]:
    """What became of the batch: the version that it was trained into, or why the guard refused it."""
    if result.skipped is None:
        return {"verdict": "trained", "trained_as": result.policy_version}
    return {"verdict": "refused", "reason": result.skipped}


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, DIGITS) for value in values]
