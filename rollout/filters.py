"""Which groups have signal to learn from and are fresh enough, and when too few of them are.

The pipeline depth D sets how old data is on average, the cap S bounds how old at most. Tokens beyond S are taken out of
the loss; a trajectory is never cancelled for its age, because what takes long is what is hard.
"""

from collections.abc import Mapping, Sequence
from statistics import pstdev

from configs.errors import UserError
from rollout.lifecycle import WITH_SIGNAL, GroupCounts, State
from rollout.types import Ending

SOLVED = 1.0
"""The outcome of a right attempt. A custom scorer may give less for a part of it."""
LEAST_FRESH_SHARE = 0.1
"""A group with a smaller share of its tokens within the cap is expired, and its task is drawn again."""


class NoSignalError(UserError):
    """Too many groups in a row had no signal."""


def has_signal(rewards: Sequence[float | None], *, min_std: float = 1e-3) -> bool:
    """Return whether the group's raw outcomes differ, so that its advantages are not all zero. None is unscored.

    `statistics.pstdev` is exact for equal values; a naive float std is not and lets dead groups pass.
    """
    valid = [reward for reward in rewards if reward is not None]
    return len(valid) >= 2 and pstdev(valid) >= min_std


def ending_of(outcomes: Sequence[float | None], totals: Sequence[float | None]) -> Ending | None:
    """Return how a group ends, or None if fewer than two of its trajectories could be scored.

    `outcomes`: raw accuracy per trajectory, None where it could not be scored. `totals`: the reward it trains with,
    None where it does not train. "ready": among the trajectories that train, at least half of the group, raw outcomes
    and totals differ. "overlong": the outcomes differ, but the overlong rule took too many cut trajectories out, or
    evened a right one out with a wrong one. "unscored": fewer than half could be scored. The same part of a score for
    all is "all_wrong".
    """
    valid = [outcome for outcome in outcomes if outcome is not None]
    if len(valid) < 2:
        return None
    if 2 * len(valid) < len(outcomes):
        return "unscored"
    if not has_signal(valid):
        return "all_right" if max(valid) == SOLVED else "all_wrong"
    trained = [outcome for outcome, total in zip(outcomes, totals, strict=True) if total is not None]
    enough = 2 * len(trained) >= len(outcomes)
    return "ready" if enough and has_signal(trained) and has_signal(totals) else "overlong"


class StarvationGuard:
    """Counts groups without signal since the last one with.

    A third of the bound is worth a warning, at the bound the run ends.
    """

    def __init__(self, max_groups: int, num_without_signal: int) -> None:
        self._max_groups = max_groups
        self.num_without_signal = num_without_signal
        self._most = num_without_signal

    def observe(self, *, signal: bool) -> None:
        self.num_without_signal = 0 if signal else self.num_without_signal + 1
        self._most = max(self._most, self.num_without_signal)

    def begin_batch(self) -> None:
        """Start a new count of the longest row."""
        self._most = self.num_without_signal

    @property
    def warns(self) -> bool:
        """Judged by the longest row since the batch before: what ends a row is what fills the batch."""
        return self._most >= max(1, self._max_groups // 3)

    @property
    def gives_up(self) -> bool:
        return self.num_without_signal >= self._max_groups

    def diagnosis(self, counts: GroupCounts, reasons: Mapping[str, int], solve_rates: Mapping[str, float]) -> str:
        """Describe what happened to the groups, with `reasons` and their numbers, and what to do.

        `solve_rates`: the share of right attempts at the last tasks of each data set.
        """
        named = ", ".join(f"{num} x {reason}" for reason, num in reasons.items())
        rates = ", ".join(f"{dataset} {rate:.0%}" for dataset, rate in solve_rates.items())
        return (
            f"{self._most} groups in a row carried no signal (bound {self._max_groups}); of all "
            f"{counts.drawn} drawn, {counts.all_right} were all right, {counts.all_wrong} all wrong, "
            f"{counts.overlong} overlong, {counts.unscored} unscored, {counts.failed} failed, {counts.expired} expired"
            f"{f' ({named})' if named else ''}; right attempts of late: {rates or 'none'}. "
            "Make the tasks easier (all wrong) or harder (all right), raise rollout.max_turn_tokens (overlong), or "
            "raise max_empty_batches"
        )


def oldest_trained_version(published: Mapping[int, int], *, max_staleness: int) -> int:
    """Return the oldest version whose tokens may still be trained on: S train steps behind the newest.

    `published`: the step after which each version was published. A run that is cut off publishes the weights of a step
    again under a new number, which makes nothing older. Where steps were taken back, tokens beyond the cap may be
    trained on by as many steps, until these are made again.
    """
    first = published[max(published)] - max_staleness
    oldest = min(version for version, step in published.items() if step >= first)
    return oldest - max(0, published[oldest] - first)


def version_ages(published: Mapping[int, int], *, oldest_version: int, same_again: bool = False) -> dict[int, int]:
    """Return the train steps between each version from `oldest_version` on and the newest weights.

    `published`: the step after which each version was published, at least one. A version that it lacks between two
    others is the step after the one before: a crash came before its step was noted. A version whose step was taken back
    is at least 1, since the step was made again with another outcome; with `same_again`, as in a synchronous run, with
    the same.
    """
    first, last = min(published), max(published)
    steps = {first: published[first]}
    for version in range(first + 1, last + 1):
        steps[version] = published.get(version, steps[version - 1] + 1)
    earliest, ages = steps[last], {}
    for version in range(last, max(first, oldest_version) - 1, -1):
        ages[version] = max(abs(steps[last] - steps[version]), int(steps[version] > earliest and not same_again))
        earliest = min(earliest, steps[version])
    return ages


def fresh_share(versions: Mapping[int, int], *, ages: Mapping[int, int]) -> float:
    """Return the share of a group's tokens that the learner will train on; 1 for a group without tokens.

    `versions`: number of tokens by policy version. `ages`: those of the versions within the cap. A version beyond all
    of them is fresh, too: workers sample with new weights before their step is noted.
    """
    total = sum(versions.values())
    fresh = sum(num for version, num in versions.items() if version in ages or version > max(ages))
    return fresh / total if total else 1.0


def bias_metrics(groups: Sequence[tuple[State, float, int]]) -> dict[str, float]:
    """Return metrics that compare trained with drawn groups, none for fewer than ten trained ones.

    `groups`: state, seconds and tokens of the groups that ended last.

    bias/length_trained_over_drawn: mean tokens of trained groups over those of all groups with signal.
    bias/slow_decile_share: share of trained groups among whose with signal the slowest tenth are; 0.1 is unbiased.
    """
    signal = [group for group in groups if group[0] in WITH_SIGNAL]
    trained = [group for group in signal if group[0] in (State.IN_BATCH, State.TRAINED)]
    if len(trained) < 10:
        return {}
    slow = sorted(seconds for _, seconds, _ in signal)[int(0.9 * len(signal))]
    drawn_tokens = sum(tokens for *_, tokens in signal) / len(signal)
    return {
        "bias/length_trained_over_drawn": sum(tokens for *_, tokens in trained) / len(trained) / max(drawn_tokens, 1),
        "bias/slow_decile_share": sum(seconds >= slow for _, seconds, _ in trained) / len(trained),
    }
