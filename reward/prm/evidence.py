"""The weight that step scores earn: how often they order two decisions in one state as the attempts end.

Siblings that decide differently after the same prompt and end differently test a scorer in every batch, at no cost
(`learner.credit.share_in_order`). A family without such evidence gives its scores no weight.
"""

import math
from collections.abc import Mapping, Sequence

from envs.datasets.families import FAMILIES
from rollout.types import Group

OTHER = "other"
"""Stands for all data sets that are not generated."""
EVIDENCE_FAMILIES = (*FAMILIES, OTHER)
FEWEST_GROUPS, NEWEST_GROUPS = 4, 40
"""Groups with evidence of a family: the fewest that give a weight, and at least how many of the newest count."""
PRIOR_GROUPS = 3
"""Groups at chance that count for each family, so that a few lucky groups give no full weight."""
FULL = 0.2
"""Share above one half, less a standard error, at which the scores have their full weight."""


def family_of(dataset: str) -> str:
    return dataset if dataset in FAMILIES else OTHER


def weight_of(group: Group, weights: Mapping[str, float]) -> float:
    """Return the weight of a group's step scores, by its family."""
    return weights.get(family_of(group.trajectories[0].task.dataset), 0.0)


def step_weights(rows: Sequence[Mapping[str, float]], full: float) -> dict[str, float]:
    """Return the weight of step scores by family, in [0, `full`], from the metrics of the train steps so far.

    The weight grows linearly with the lower end m - se of the mean share m of pairs in order, shrunk towards one half:
    from 0 at one half to `full` at one half plus `FULL`. se is that of a share, which bounds the one over groups from
    above. Families without any evidence are left out.
    """
    weights = {}
    for family in EVIDENCE_FAMILIES:
        total, num = _newest(rows, family)
        if num:
            share = (PRIOR_GROUPS * 0.5 + total) / (PRIOR_GROUPS + num)
            low = share - math.sqrt(share * (1 - share) / num)
            weights[family] = full * min(max((low - 0.5) / FULL, 0.0), 1.0) if num >= FEWEST_GROUPS else 0.0
    return weights


def _newest(rows: Sequence[Mapping[str, float]], family: str) -> tuple[float, int]:
    """Return the sum of the newest shares of a family, and how many groups they are from."""
    total, num = 0.0, 0
    for row in reversed(rows):
        here = int(row.get(f"prm/order_groups/{family}", 0))
        total, num = total + here * row.get(f"prm/order/{family}", 0.0), num + here
        if num >= NEWEST_GROUPS:
            break
    return total, num
