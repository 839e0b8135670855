"""Dynamic sampling: which groups carry a gradient at all (DAPO, arXiv 2503.14476, eq. 8)."""

from collections.abc import Sequence
from statistics import pstdev

from rollout.lifecycle import Ending


def has_signal(rewards: Sequence[float | None], *, min_std: float = 1e-3, min_valid: int = 2) -> bool:
    """True if the group's raw outcomes differ, so that its advantages are not all zero.

    `rewards`: raw accuracy per trajectory, None where a trajectory could not be scored. Judged on what the
    task decides, never on shaped rewards: an all-wrong group with different length penalties has no signal.
    `statistics.pstdev` is exact for equal values; a naive float std is not and lets dead groups pass.
    """
    valid = [reward for reward in rewards if reward is not None]
    return len(valid) >= max(min_valid, 1) and pstdev(valid) >= min_std


def ending_of(outcomes: Sequence[float | None], totals: Sequence[float | None]) -> Ending | None:
    """How a group ends, None where too few of its trajectories could be scored to tell.

    `outcomes`: raw accuracy per trajectory, None where it could not be scored. `totals`: the reward it trains with,
    None where it does not train. "ready" means that some advantage is not zero: among the trajectories that train, raw
    outcomes and totals differ. "overlong" is a group whose outcomes differ only until the overlong rule has taken cut
    trajectories out, or has evened a right but long one out with a wrong one.
    """
    valid = [outcome for outcome in outcomes if outcome is not None]
    if len(valid) < 2:
        return None
    if not has_signal(valid):
        return "all_right" if max(valid) > 0 else "all_wrong"
    trained = [outcome for outcome, total in zip(outcomes, totals, strict=True) if total is not None]
    return "ready" if has_signal(trained) and has_signal(totals) else "overlong"
