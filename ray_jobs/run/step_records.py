"""The groups of a train step with everything known about them, for the log of the run."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import ray
from msgspec import structs

from configs.reward import Credit
from learner.credit import assign_credit, note_learner_logprobs
from learner.types import StepResult
from rollout.codec import decode_group
from rollout.lifecycle import Batch, GroupRow, State
from rollout.types import Group, Trajectory


class StepGroups:
    """The groups of a batch, fetched and decoded in a thread while the learner trains on them."""

    def __init__(self, batch: Batch) -> None:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="groups")
        self._groups = thread.submit(lambda: [decode_group(data) for data in ray.get(list(batch.refs))])
        thread.shutdown(wait=False)

    def __iter__(self) -> Iterator[Group]:
        """Iterate over the groups, after waiting until they are there."""
        return iter(self._groups.result())


def step_trajectories(
    batch: Batch, groups: StepGroups, result: StepResult, *, scheme: Credit, prm_weight: float
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
    for state, reason, ref in batch.untrained:
        for trajectory in decode_group(ray.get([ref])[0]).trajectories:
            trajectory.step, trajectory.verdict, trajectory.reason = batch.step, state, reason
            yield trajectory


def group_rows(batch: Batch, result: StepResult) -> list[GroupRow]:
    """Return what became of all groups since the batch before, those of this batch included."""
    end, reason = (State.TRAINED, "") if result.skipped is None else (State.REFUSED, result.skipped)
    return [
        structs.replace(row, state=end, reason=reason) if row.state is State.IN_BATCH else row for row in batch.rows
    ]
