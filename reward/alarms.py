"""Alarms: signs that the policy pleases the process reward model instead of solving tasks."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
        window, bounds = self._config.window, self._config
        if len(self._history) < 2 * window:
            return
        old, new = list(self._history)[:window], list(self._history)[window:]
        solved = _mean(new, "rollout/solve_rate") - _mean(old, "rollout/solve_rate")
        score = _mean(new, "prm/score") - _mean(old, "prm/score")
        if score > bounds.score_rise and solved < score / 5:
            yield "divergence", f"the PRM's mean score rose by {score:.3g} while the solve rate rose by {solved:.3g}"
        before = _mean(old, "rollout/turns")
        turns = _mean(new, "rollout/turns") / before - 1 if before else 0.0
        if turns > bounds.turns_rise and solved <= 0:
            yield "steps", f"steps per trajectory rose by {turns:.0%} while the solve rate changed by {solved:.3g}"
        # Only a rise says something: where a tool call is longer than a guess, long ones are rightly better.
        length = _mean(new, "prm/length_correlation") - _mean(old, "prm/length_correlation")
        if length > bounds.length_correlation_rise and solved <= 0:
            yield "length", f"score and length correlate more by {length:.3g}, the solve rate changed by {solved:.3g}"


def _mean(rows: Sequence[Metrics], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows) / len(rows)
