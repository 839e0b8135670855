"""Which groups have signal to learn from, and when too few of them have."""

from collections.abc import Mapping, Sequence
from statistics import pstdev

from rollout.lifecycle import GroupCounts
from rollout.types import Ending

SOLVED = 1.0
"""The outcome of an attempt that is right. A custom scorer may give less for a part of it."""


def has_signal(rewards: Sequence[float | None], *, min_std: float = 1e-3) -> bool:
    """Return whether the group's raw outcomes differ, so that its advantages are not all zero.

    `rewards`: raw accuracy per trajectory, None where a trajectory could not be scored. Judged on what the
    task decides, never on shaped rewards: an all-wrong group with different length penalties has no signal.
    `statistics.pstdev` is exact for equal values; a naive float std is not and lets dead groups pass.
    """
    valid = [reward for reward in rewards if reward is not None]
    return len(valid) >= 2 and pstdev(valid) >= min_std


def ending_of(outcomes: Sequence[float | None], totals: Sequence[float | None]) -> Ending | None:
    """Return how a group ends, or None if too few of its trajectories could be scored.

    `outcomes`: raw accuracy per trajectory, None where it could not be scored. `totals`: the reward it trains with,
    None where it does not train. "ready" means that some advantage is not zero: among the trajectories that train, raw
    outcomes and totals differ. "overlong" is a group whose outcomes differ only until the overlong rule has taken cut
    trajectories out, or has evened a right but long one out with a wrong one. Attempts that all got the same part of a
    score are all wrong, for none of them solved the task.
    """
    valid = [outcome for outcome in outcomes if outcome is not None]
    if len(valid) < 2:
        return None
    if not has_signal(valid):
        return "all_right" if max(valid) == SOLVED else "all_wrong"
    trained = [outcome for outcome, total in zip(outcomes, totals, strict=True) if total is not None]
    return "ready" if has_signal(trained) and has_signal(totals) else "overlong"


class StarvationGuard:
    """Counts groups without signal since the last one with.

    A third of the bound is worth a warning, at two thirds a smaller batch is better than none, at the bound waiting
    has no point any more.
    """

    def __init__(self, max_groups: int, num_without_signal: int) -> None:
        self._max_groups = max_groups
        self.num_without_signal = num_without_signal
        self._most = num_without_signal

    def observe(self, *, signal: bool) -> None:
        self.num_without_signal = 0 if signal else self.num_without_signal + 1
        self._most = max(self._most, self.num_without_signal)

    def begin_batch(self) -> None:
        """Start a new count of the longest row: earlier rows were reported."""
        self._most = self.num_without_signal

    @property
    def warns(self) -> bool:
        """Judged by the longest row since the batch before: what ends a row is what fills the batch."""
        return self._most >= max(1, self._max_groups // 3)

    @property
    def relaxes(self) -> bool:
        return self.num_without_signal >= max(1, 2 * self._max_groups // 3)

    @property
    def gives_up(self) -> bool:
        return self.num_without_signal >= self._max_groups

    def diagnosis(self, counts: GroupCounts, reasons: Mapping[str, int]) -> str:
        """Describe what happened to the groups, and what to do.

        `reasons`: number of groups that failed or expired, by reason.
        """
        named = ", ".join(f"{num} x {reason}" for reason, num in reasons.items())
        return (
            f"{self._most} groups in a row carried no signal (bound {self._max_groups}); of all "
            f"{counts.drawn} drawn, {counts.all_right} were all right, {counts.all_wrong} all wrong, "
            f"{counts.overlong} overlong, {counts.failed} failed, {counts.expired} expired"
            f"{f' ({named})' if named else ''}. Make the tasks easier (all wrong) or harder (all right), raise "
            "rollout.max_turn_tokens (overlong), or raise max_empty_batches"
        )
