"""Judging a group: outcome before PRM before filter, how length shapes it, and the result that the store keeps."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace

from configs.learner import FilterOverlongConfig, LearnerConfig, SoftOverlongConfig
from reward.collected import outcome_of
from reward.statistics import group_statistics
from reward.stored import stored_group
from reward.types import Reward, ScoredGroup, StepScores
from rollout.store.lifecycle import GroupResult
from rollout.types import Trajectory, TrajectoryGroup

MAX_REASON = 300
"""Characters."""


def soft_overlong_penalty(length: int, *, max_length: int, cache_length: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to max - cache tokens, then falling
    linearly to -1 at `max_length`, -1 beyond. With `cache_length` 0 there is no slope, only the step."""
    if length <= max_length - cache_length:
        return 0.0
    if length > max_length or cache_length == 0:
        return -1.0
    return (max_length - cache_length - length) / cache_length


UNSCORABLE = Reward(outcome=None, total=None, parts={})


class OutcomeReward:
    """Scores with the task's scorer; the overlong rule shapes `total`, never `outcome`."""

    def __init__(self, learner: LearnerConfig, *, max_turn_tokens: int) -> None:
        self._overlong = learner.overlong
        self._max_turn_tokens = max_turn_tokens

    def score_group(self, group: TrajectoryGroup) -> ScoredGroup:
        return ScoredGroup(group=group, rewards=tuple(self.score(trajectory) for trajectory in group.trajectories))

    def score(self, trajectory: Trajectory) -> Reward:
        """Infrastructure faults are unscorable, not wrong; so is a cut trajectory under `filter`, and an answer of
        which a scorer of one's own cannot tell. Raises OwnCodeError."""
        outcome = outcome_of(trajectory)
        if outcome is None:
            return UNSCORABLE
        trained = [turn for turn in trajectory.planner_turns if turn.trainable]
        if isinstance(self._overlong, FilterOverlongConfig) and any(turn.truncated for turn in trained):
            return Reward(outcome=outcome, total=None, parts={})
        parts = {"outcome": outcome}
        if isinstance(self._overlong, SoftOverlongConfig):
            lengths = [len(turn.completion.token_ids) for turn in trained]
            parts["overlong"] = 0.0
            if lengths:
                parts["overlong"] = soft_overlong_penalty(
                    max(lengths), max_length=self._max_turn_tokens, cache_length=self._overlong.cache_tokens
                )
        return Reward(outcome=outcome, total=sum(parts.values()), parts=parts)


def group_result(scored: ScoredGroup, *, duration_s: float) -> GroupResult:
    """`duration_s`: from the permit to the judgement."""
    ending, statistics = scored.ending, group_statistics(scored)
    totals: dict[str, float] = {
        **asdict(statistics),
        **seconds_of(scored.group),
        "groups": 1.0,
        "kept": float(ending == "ready"),
        "duration_s": duration_s,
        "prm_s": scored.step_scores.waited_s if scored.step_scores else 0.0,
    }
    return GroupResult(
        ending=ending,
        payload=stored_group(scored),
        versions=_token_versions(scored.group.trajectories),
        duration_s=duration_s,
        right=statistics.right,
        scored=statistics.scored,
        facts=totals,
        reason=_why_unscorable(scored),
    )


def seconds_of(group: TrajectoryGroup) -> dict[str, float]:
    """That its trajectories waited for completions, and for tools."""
    turns = [turn for one in group.trajectories for turn in one.planner_turns]
    return {"generate_s": sum(turn.generate_s for turn in turns), "tool_s": sum(turn.tool_s for turn in turns)}


def failed_result(error: Exception) -> GroupResult:
    """A group whose rollout raised: nothing can be said of its trajectories."""
    reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
    return GroupResult(ending=None, payload=b"", versions={}, facts={"groups": 1.0}, reason=reason)


def _token_versions(trajectories: tuple[Trajectory, ...]) -> dict[int, int]:
    """Planner tokens that can be trained on, by the version that sampled them."""
    turns = (turn for one in trajectories for turn in one.planner_turns if turn.trainable)
    return dict(Counter(version for turn in turns for version in turn.completion.token_versions))


def _why_unscorable(scored: ScoredGroup) -> str:
    stops = Counter(
        one.failure or one.stop_reason if one.stop_reason == "infrastructure" else f"{one.stop_reason}, without a score"
        for one, outcome in zip(scored.group.trajectories, scored.outcomes, strict=True)
        if outcome is None
    )
    return ", ".join(f"{num} of {len(scored.outcomes)} {stop}" for stop, num in stops.items())[:MAX_REASON]


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
        # In threads: an answer that is hard to check must not hold up the worker's other episodes, nor its siblings.
        asked = (asyncio.to_thread(self._outcome.score, one) for one in group.trajectories)
        scored = ScoredGroup(group=group, rewards=tuple(await asyncio.gather(*asked)))
        if self._score_steps is None or scored.ending != "ready":
            return scored
        started = time.monotonic()
        scores = await self._asked(self._score_steps, group)
        return replace(scored, step_scores=replace(scores, waited_s=time.monotonic() - started))

    async def _asked(self, score_steps: ScoreSteps, group: TrajectoryGroup) -> StepScores:
        for delay in (*self._delays_s, None):
            try:
                return await score_steps(group)
            except self._transient:
                if delay is not None:
                    await asyncio.sleep(delay)
        unscored = tuple((None,) * len(one.planner_turns) for one in group.trajectories)
        return StepScores(raw=unscored, prm_digest="")
