"""The judgement of a group by outcomes or by step scores, and guided attempts for a group without a right one."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from msgspec import structs

from configs.api_keys import without_secrets
from configs.errors import UserError
from configs.learner import LearnerConfig
from configs.plugins import failure
from learner.credit import step_reward
from reward.scorers import outcome_of
from reward.statistics import group_facts
from rollout.filters import SOLVED, ending_of
from rollout.guide import Guide, ScoreSteps
from rollout.types import Group, GroupSummary, Reward, StepScores, Trajectory, is_answer

MAX_REASON = 300
"""Characters of a reason."""
RETRY_DELAYS_S = (0.1, 1.0, 5.0, 15.0, 30.0)
"""Long enough for a PRM that died to be restarted."""


class PrmError(UserError):
    """The PRM gave no usable score. The step stays unscored and may be tried again; it is never a zero."""


def soft_overlong_penalty(length: int, *, max_length: int, cache_length: int) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

    It is 0 up to max - cache tokens, then falls linearly to -1 at `max_length`, and is -1 beyond. With `cache_length` 0
    there is no slope, only the step.
    """
    if length <= max_length - cache_length:
        return 0.0
    if length > max_length:
        return -1.0
    return (max_length - cache_length - length) / cache_length


class OutcomeReward:
    """The task's scorer, with the overlong rule, which shapes `total` and never `outcome`.

    With `process` the lowest step score stands for the outcome, and no answer is compared with a reference.
    """

    def __init__(self, learner: LearnerConfig, *, max_turn_tokens: int, process: bool = False) -> None:
        self.process = process
        self._overlong = learner.overlong
        self._cache_tokens = learner.overlong_cache_tokens
        self._max_turn_tokens = max_turn_tokens

    def score(self, trajectory: Trajectory) -> Reward:
        """Return the reward of a trajectory, without a total for what must not be trained on. Raises OwnCodeError."""
        outcome = lowest_step_score(trajectory) if self.process else outcome_of(trajectory)
        if outcome is None:
            return Reward(outcome=None, total=None)
        trained = [turn for turn in trajectory.planner_turns if turn.trainable]
        if self._overlong == "filter" and any(turn.truncated for turn in trained):
            return Reward(outcome=outcome, total=None)
        if self._overlong != "soft":
            return Reward(outcome=outcome, total=outcome)
        longest = max((turn.num_tokens for turn in trained), default=0)
        penalty = soft_overlong_penalty(longest, max_length=self._max_turn_tokens, cache_length=self._cache_tokens)
        return Reward(outcome=outcome, total=outcome + penalty)


def retried(score_steps: ScoreSteps, transient: tuple[type[Exception], ...]) -> ScoreSteps:
    """Return a scorer that scores again after the errors in `transient`, and raises the last one."""

    async def score(group: Group) -> StepScores:
        for delay in RETRY_DELAYS_S:
            with suppress(*transient):
                return await score_steps(group)
            await asyncio.sleep(delay)
        return await score_steps(group)

    return score


class GroupJudge:
    """Outcome rewards or, with `score_steps`, step scores and rewards that are made of them.

    After one of the errors in `transient` every step of the group stays unscored, which is counted
    (`prm/unscored_share`).
    """

    def __init__(
        self,
        outcome: OutcomeReward,
        score_steps: ScoreSteps | None = None,
        *,
        transient: tuple[type[Exception], ...] = (),
    ) -> None:
        self._outcome = outcome
        self._score_steps = score_steps
        self._transient = transient

    async def judge(self, group: Group) -> float:
        """Fill in the rewards and scores of a group. Returns the seconds that it waited for step scores."""
        waited_s = await self._score(group)
        # In threads: an answer that is hard to check must not hold up the other episodes of the worker.
        rewards = await asyncio.gather(*(asyncio.to_thread(self._outcome.score, one) for one in group.trajectories))
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            trajectory.reward = reward
        return waited_s

    async def _score(self, group: Group) -> float:
        """Fill in the step scores of a group; return the seconds that this took."""
        if self._score_steps is None:
            return 0.0
        started = time.monotonic()
        scores = StepScores(raw=tuple((None,) * len(one.planner_turns) for one in group.trajectories), prm_digest="")
        with suppress(*self._transient):
            scores = await self._score_steps(group)
        scores.write_to(group)
        return time.monotonic() - started


def lowest_step_score(trajectory: Trajectory) -> float | None:
    """Return the lowest mapped step score of an attempt, 0 without an answer; None where a step has no score.

    No further step can raise a minimum (PURE, arXiv 2504.15275), and an attempt that never ends gains nothing.
    """
    rewards = [step_reward(turn) for turn in trajectory.planner_turns]
    scored = [reward for reward in rewards if reward is not None]
    if trajectory.stop_reason == "infrastructure" or not scored or len(scored) < len(rewards):
        return None
    return min(scored) if is_answer(trajectory.answer) else 0.0


def group_summary(group: Group, *, duration_s: float, prm_s: float) -> GroupSummary:
    """Return the facts of a judged group.

    `duration_s` are the seconds from the permit to the judgement, `prm_s` those of them that it waited for step scores.
    """
    ending, facts = ending_of(group.outcomes, group.totals), group_facts(group)
    kept = float(ending == "ready")
    stops = Counter(
        one.failure or one.stop_reason + (", without a score" if one.stop_reason != "infrastructure" else "")
        for one in group.trajectories
        if one.outcome is None
    )
    reasons = ", ".join(f"{num} of {len(group.trajectories)} {stop}" for stop, num in stops.items())
    return GroupSummary(
        ending=ending,
        versions=group.token_versions,
        duration_s=duration_s,
        right=facts["right"],
        scored=int(facts["scored"]),
        facts={**facts, "groups": 1.0, "kept": kept, "duration_s": duration_s, "prm_s": prm_s},
        reason=without_secrets(reasons)[:MAX_REASON],
    )


def rescued(
    group: Group, summary: GroupSummary, guided: Group, guides: Sequence[Guide], *, duration_s: float
) -> tuple[Group, GroupSummary]:
    """Return a group without a right attempt with the right ones of guided attempts, and its facts.

    They take the places of wrong ones, of unscored ones first. What is counted of the attempts, and with it the solve
    rate, stays that of the policy alone. `duration_s` are the seconds of the guided attempts.
    """
    right = [one for one in guided.trajectories if one.outcome == SOLVED and one.total is not None]
    wrong = sorted(group.trajectories, key=lambda one: one.outcome is None)
    num = min(len(right), len(wrong) - 1)
    group = Group(id=group.id, trajectories=(*wrong[: len(wrong) - num], *right[:num]))
    ending = ending_of(group.outcomes, group.totals)
    facts = {
        **summary.facts,
        "kept": float(ending == "ready"),
        "duration_s": summary.duration_s + duration_s,
        "prm_s": summary.facts["prm_s"] + max(guide.waited_s for guide in guides),
        "guided_groups": 1.0,
        "rescued": float(ending == "ready"),
        "guided_tokens": float(sum(guide.num_tokens for guide in guides)),
    }
    return group, structs.replace(
        summary,
        ending=ending,
        versions=group.token_versions,
        duration_s=summary.duration_s + duration_s,
        facts=facts,
    )


def failed_summary(error: Exception) -> GroupSummary:
    """Return the facts of a group whose rollout raised."""
    return GroupSummary(ending=None, facts={"groups": 1.0}, reason=failure(error)[:MAX_REASON])
