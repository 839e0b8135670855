"""The held-out solve rates of a run as points of its learning curve."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward.paired import wilson_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A solve rate with its 95% Wilson interval, all between 0 and 1; `step` counts the train steps before it."""

    policy: str
    step: int
    rate: float
    low: float
    high: float


def held_out_rates(summary: Mapping[str, Any]) -> list[HeldOut]:
    """Of a run's summary.json, before the first and after the last train step; none while they are not known."""
    count, last = summary.get("num_eval_tasks"), summary.get("num_steps")
    found = []
    for policy, step in (("before", 0), ("after", last)):
        rate = summary.get(f"solve_rate_{policy}")
        if count and step is not None and rate is not None:
            low, high = wilson_interval(round(rate * count), count)
            found.append(HeldOut(policy=policy, step=step, rate=rate, low=low, high=high))
    return found
