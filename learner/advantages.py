"""Group-relative advantages, over trajectories and never over turns."""

import math
from collections.abc import Sequence


def group_normalized(
    rewards: Sequence[float | None], *, ddof: int = 1, eps: float = 1e-6, min_std: float = 1e-3
) -> list[float]:
    """Advantage of each trajectory: (reward - group mean) / (group std + eps).

    GRPO (arXiv 2402.03300, section 4.1.2), DAPO (arXiv 2503.14476, eq. 9), Flow-GRPO (arXiv 2510.05592,
    eq. 7). `rewards` holds one number per trajectory of one group; None is a trajectory that could not be
    scored: it enters no statistic and gets advantage 0. A group with fewer than two scored trajectories, or
    whose std is below `min_std`, gets zeros: its residue would be rounding noise blown up to full size.
    `ddof` 1 is the sample std, 0 the population std. Raises ValueError for a reward that is not finite.
    """
    scored = [float(reward) for reward in rewards if reward is not None]
    if not all(math.isfinite(reward) for reward in scored):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if len(scored) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - ddof))
    if std < min_std:
        return [0.0] * len(rewards)
    return [0.0 if reward is None else (reward - mean) / (std + eps) for reward in rewards]
