"""Alarms: signs that the policy exploits the process reward model instead of solving tasks.

Each sign compares the PRM with something that it cannot influence: the solve rate, the outcomes of siblings, junk
decisions, and the generator's plan.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import numpy as np

Metrics = Mapping[str, float]

ALARM_WINDOW = 4
"""Train steps over which a sign is measured."""
FACTOR = 0.5
"""Factor of the weight at each alarm."""
SOLVE_RATE_FALL = 0.15
"""Fall of the solve rate below its best window that is an alarm, if it is more than noise."""
NOISE_DEVIATIONS = 3.0
"""A window's solve rate is low only if it is this many standard deviations of a window below what chance explains."""
RANKING_DEVIATIONS = 3.0
"""Standard deviations below chance at which the PRM ranks attempts against siblings with worse outcomes."""
CANARY_LIMIT = 0.3
"""Highest mean score of the best junk decision."""
REJUDGE_MSE_LIMIT = 0.2
"""Highest mean squared error of the PRM on fresh rollouts, against the generator's plan of tasks that have one."""
# Median of |a - b| for independent normal a and b of standard deviation 1.
_MEDIAN_DIFFERENCE = 0.6745 * math.sqrt(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One sign that was raised."""

    step: int
    name: str
    message: str
    """A sentence with the value and its bound."""
    prm_weight: float
    """The PRM's weight after the alarm."""


class HackingMonitor:
    """A monitor of the metrics of every train step, over the last window of steps.

    An alarm multiplies `prm_weight` by FACTOR. The same alarm then pauses for a window, so that one
    cause does not silence the PRM at once. After steps without any sign the weight recovers by one alarm, never above
    its initial value: after two windows at first, and after twice as many with every further alarm.
    """

    def __init__(self, window: int, prm_weight: float) -> None:
        self._window: deque[Metrics] = deque(maxlen=window)
        self._solve_rates: list[float] = []
        self._last: dict[str, int] = {}
        self._full_weight = prm_weight
        self._active = 0
        self._quiet = 0
        self.alarms: list[Alarm] = []

    @property
    def prm_weight(self) -> float:
        """Return the weight for the next train step, lowered by the active alarms."""
        return self._full_weight * FACTOR**self._active

    def observe(self, step: int, metrics: Metrics) -> list[Alarm]:
        """Return the alarms of this step after lowering the weight for each."""
        self._window.append(metrics)
        if "rollout/solve_rate" in metrics:
            self._solve_rates.append(metrics["rollout/solve_rate"])
        signs = list(self._signs())
        raised, window = [], self._window.maxlen or 0
        for name, message in signs:
            if step - self._last.get(name, step - window) >= window:
                self._active += 1
                self._last[name] = step
                raised.append(Alarm(step=step, name=name, message=message, prm_weight=self.prm_weight))
        self.alarms += raised
        self._quiet = 0 if signs else self._quiet + 1
        if self._active and self._quiet >= window * 2 ** len(self.alarms):
            self._active, self._quiet = self._active - 1, 0
        return raised

    def _signs(self) -> Iterator[tuple[str, str]]:
        window = len(self._window)
        if window < (self._window.maxlen or 0):
            return
        yield from self._fall()
        if deviations := self._of_window("prm/sibling_z"):
            # The sum of n independent standard normal deviations over sqrt(n) is standard normal again.
            below = -sum(deviations) / math.sqrt(len(deviations))
            if below > RANKING_DEVIATIONS:
                yield (
                    "ranking",
                    f"step scores rank attempts below siblings with worse outcomes: over the last {window} steps "
                    f"{below:.1f} standard deviations below chance, and its bound is {RANKING_DEVIATIONS:g}",
                )
        for name, metric, bound in (
            ("canary", "prm/canary_max", CANARY_LIMIT),
            ("fresh error", "prm/rejudge_mse", REJUDGE_MSE_LIMIT),
        ):
            values = self._of_window(metric)
            if values and fmean(values) > bound:
                yield name, f"{metric} over the last {window} steps is {fmean(values):.3g}, above its bound {bound:g}"

    def _fall(self) -> Iterator[tuple[str, str]]:
        """Compare the solve rate with its best window of the whole run, so that a slow drift is seen, too."""
        window, rates = len(self._window), np.array(self._solve_rates)
        if len(rates) < 2 * window:
            return
        means = np.convolve(rates, np.full(window, 1 / window), "valid")
        best, now = float(means.max()), float(means[-1])
        # Differences of neighbours do not count learning as noise; their median does not count a jump.
        deviation = float(np.median(np.abs(np.diff(rates)))) / _MEDIAN_DIFFERENCE / math.sqrt(window)
        # The best of n windows lies about sqrt(2 ln n) standard deviations above their mean by chance alone.
        by_chance = math.sqrt(2 * math.log(len(rates) / window)) * deviation
        bound = max(SOLVE_RATE_FALL, by_chance + NOISE_DEVIATIONS * deviation)
        if best - now > bound:
            yield (
                "solve rate",
                f"the solve rate over the last {window} steps is {now:.3g}, {best - now:.3g} below its best window's "
                f"{best:.3g}, and its bound is {bound:.3g}",
            )

    def _of_window(self, metric: str) -> list[float]:
        return [row[metric] for row in self._window if metric in row]
