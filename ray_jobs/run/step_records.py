"""The groups of a train step with everything known about them, for the log of the run."""

from collections.abc import Iterable, Iterator

import ray
from msgspec import structs

from configs.reward import Credit
from learner.credit import assign_credit, note_learner_logprobs
from learner.types import StepResult
from rollout.codec import decode_group
from rollout.lifecycle import Batch, GroupRow, State
from rollout.types import Group, Trajectory


def batch_groups(batch: Batch) -> Iterator[Group]:
    """Fetch the groups of a batch, when the first is asked for, and decode them one by one."""
    yield from map(decode_group, ray.get(list(batch.refs)))


def step_trajectories(
    batch: Batch, groups: Iterable[Group], result: StepResult, *, scheme: Credit, prm_weight: float
) -> Iterator[Trajectory]:
    """Yield all trajectories of the batch with the credit that the learner trained on.

    The trajectories of groups without signal that were kept for reading follow.
    """
    trained = result.skipped is None
    for group in groups:
        assign_credit(group, scheme=scheme, prm_weight=prm_weight)
        for trajectory in group.trajectories:
            note_learner_logprobs(trajectory, result.learner_logprobs, batch.version_ages)
            trajectory.step = batch.step
            trajectory.verdict = State.TRAINED if trained else State.REFUSED
            trajectory.trained_as = result.policy_version if trained else None
            trajectory.reason = result.skipped or ""
            yield trajectory
    payloads = ray.get([ref for _, _, ref in batch.untrained])
    for (state, reason, _), payload in zip(batch.untrained, payloads, strict=True):
        for trajectory in decode_group(payload).trajectories:
            trajectory.step, trajectory.verdict, trajectory.reason = batch.step, state, reason
            yield trajectory


def group_rows(batch: Batch, result: StepResult) -> list[GroupRow]:
    """Return what became of all groups since the batch before, those of this batch included."""
    end, reason = (State.TRAINED, "") if result.skipped is None else (State.REFUSED, result.skipped)
    return [
        structs.replace(row, state=end, reason=reason) if row.state is State.IN_BATCH else row for row in batch.rows
    ]
