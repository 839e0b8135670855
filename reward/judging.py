"""Judging a group: the outcome first, then, where the group has signal, the process reward model."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from reward.outcome import OutcomeReward
from reward.types import ScoredGroup, StepScores
from rollout.types import TrajectoryGroup

RETRY_DELAYS_S = (0.1, 1.0, 5.0, 15.0, 30.0)
"""Long enough for a PRM that died to be started again."""

ScoreSteps = Callable[[TrajectoryGroup], Awaitable[StepScores]]


class GroupJudge:
    """Outcome reward and, with `score_steps`, step scores. Groups that the filter will drop are not scored.

    `transient` are the errors after which scoring is tried again; when the last try fails every step of the group
    stays unscored, which trains it on its outcome alone and is counted (`prm/unscored_share`).
    """

    def __init__(
        self,
        outcome: OutcomeReward,
        score_steps: ScoreSteps | None = None,
        *,
        transient: tuple[type[Exception], ...] = (),
        delays_s: tuple[float, ...] = RETRY_DELAYS_S,
    ) -> None:
        self._outcome = outcome
        self._score_steps = score_steps
        self._transient = transient
        self._delays_s = delays_s

    async def judge(self, group: TrajectoryGroup) -> ScoredGroup:
        # In a thread: an answer that is hard to check must not hold up the worker's other episodes.
        scored = await asyncio.to_thread(self._outcome.score_group, group)
        if self._score_steps is None or scored.ending != "ready":
            return scored
        for delay in (*self._delays_s, None):
            try:
                return replace(scored, step_scores=await self._score_steps(group))
            except self._transient:
                if delay is not None:
                    await asyncio.sleep(delay)
        return replace(scored, step_scores=_unscored(group))


def _unscored(group: TrajectoryGroup) -> StepScores:
    return StepScores(raw=tuple((None,) * len(one.planner_turns) for one in group.trajectories), prm_digest="")
