"""Alarms: signs that the policy pleases the process reward model instead of solving tasks."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from configs.reward import AlarmConfig

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One sign, in words with its value and bound, and what the PRM's weight is after it."""

    step: int
    name: str
    message: str
    prm_weight: float


class HackingMonitor:
    """Watches the metrics of every train step. An alarm lowers `prm_weight` by the configured factor; the same
    alarm rests for a window of steps, so that one cause does not silence the PRM at a stroke."""

    def __init__(self, config: AlarmConfig, prm_weight: float) -> None:
        self._config = config
        self._history: deque[Metrics] = deque(maxlen=2 * config.window)
        self._last: dict[str, int] = {}
        self.prm_weight = prm_weight
        self.alarms: list[Alarm] = []

    def observe(self, step: int, metrics: Metrics) -> list[Alarm]:
        """The alarms of this step, already acted upon."""
        self._history.append(metrics)
        raised = [self._raise(step, name, message) for name, message in self._signs() if not self._resting(name, step)]
        self.alarms += raised
        return raised

    def _raise(self, step: int, name: str, message: str) -> Alarm:
        self.prm_weight *= self._config.factor
        self._last[name] = step
        return Alarm(step=step, name=name, message=message, prm_weight=self.prm_weight)

    def _resting(self, name: str, step: int) -> bool:
        return step - self._last.get(name, step - self._config.window) < self._config.window

    def _signs(self) -> Iterator[tuple[str, str]]:
        yield from self._trends()
        now, bounds = self._history[-1], self._config
        for name, metric, bound in (
            ("repeats", "rollout/repeat_share", bounds.repeat_share),
            ("saturation", "prm/saturated_share", bounds.saturated_share),
            ("canary", "prm/canary_max", bounds.canary),
            ("fresh error", "prm/rejudge_mse", bounds.rejudge_mse),
        ):
            value = now.get(metric)
            if value is not None and value > bound:
                yield name, f"{metric} is {value:.3g}, above its bound {bound:g}"

    def _trends(self) -> Iterator[tuple[str, str]]:
        """What rose from one window of steps to the next while the solve rate did not follow."""
        bounds = self._config
        solved, score = self._rise("rollout/solve_rate"), self._rise("prm/score")
        if solved is None:
            return
        gain = f"while the solve rate changed by {solved:.3g}"
        if score is not None and score > bounds.score_rise and solved < score / 5:
            bound = f"above its bound {bounds.score_rise:g}"
            yield "divergence", f"the PRM's mean score rose by {score:.3g}, {bound}, {gain}"
        if solved > 0:
            return
        turns = self._rise("rollout/turns", relative=True)
        if turns is not None and turns > bounds.turns_rise:
            yield (
                "steps",
                f"steps per trajectory rose by {turns:.0%}, above their bound {bounds.turns_rise:.0%}, {gain}",
            )
        # Only a rise says something: where a tool call is longer than a guess, long ones are rightly better.
        length = self._rise("prm/length_correlation")
        if length is not None and length > bounds.length_correlation_rise:
            bound = f"above its bound {bounds.length_correlation_rise:g}"
            yield "length", f"the correlation of score and length rose by {length:.3g}, {bound}, {gain}"

    def _rise(self, name: str, *, relative: bool = False) -> float | None:
        """From the window before to the last one; None where a window has no value of this metric."""
        window, rows = self._config.window, list(self._history)
        if len(rows) < 2 * window:
            return None
        sides = [[row[name] for row in side if name in row] for side in (rows[:window], rows[window:])]
        if not all(sides):
            return None
        old, new = (sum(side) / len(side) for side in sides)
        if not relative:
            return new - old
        return new / old - 1 if old else None
