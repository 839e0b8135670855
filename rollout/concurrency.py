"""How many groups a worker runs at once, found from the pressure on its engine's KV cache."""

import time
from dataclasses import dataclass

from configs.rollout import RolloutConfig
from rollout.engines.engine import EngineLoad

GROW_BELOW = 0.6
"""KV usage."""
TRIM_ABOVE = 0.8
CUT_ABOVE = 0.9
GROWTH = 1.25
TRIM = 0.9
CUT = 0.8


class ConcurrencyControl:
    """A pure state machine, for one engine; `places` stay between `min_places` and `max_places`.

    `turnover`: observations from one change to the next, in which the first shows its effect.
    """

    def __init__(self, max_places: int, *, min_places: int, turnover: int) -> None:
        self._min_places = min_places
        self._max_places = max_places
        self.places = max_places
        self._turnover = turnover
        self._since_change = turnover
        self._num_preemptions: int | None = None
        self._was_running = 0

    def observe(self, load: EngineLoad, running: int) -> int:
        """Return the number of places from now on, where `running` groups run."""
        before, self._num_preemptions = self._num_preemptions, load.num_preemptions
        preempted = before is not None and load.num_preemptions > before
        # The groups that caused a preemption since the last observation may have ended.
        loaded, self._was_running = max(running, self._was_running), running
        self._since_change += 1
        if self._since_change < self._turnover:
            return self.places
        if preempted or load.kv_usage > CUT_ABOVE:
            self._shrink(CUT, loaded)
        elif load.kv_usage > TRIM_ABOVE:
            self._shrink(TRIM, loaded)
        elif load.kv_usage < GROW_BELOW and load.num_waiting == 0 and running >= self.places:
            self._change(max(self.places + 1, int(self.places * GROWTH)))
        return self.places

    def _shrink(self, factor: float, loaded: int) -> None:
        """Shrink from what ran, because unused places cause no pressure.

        Nothing changes while the excess of an earlier change still ran, or if no group can have caused the pressure.
        """
        if 0 < loaded <= self.places:
            self._change(min(self.places - 1, int(loaded * factor)))

    def _change(self, places: int) -> None:
        places = min(self._max_places, max(self._min_places, places))
        if places != self.places:
            self.places = places
            self._since_change = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReading:
    """What a worker did since the reading before."""

    elapsed_s: float
    admission_wait_s: float
    """With places free."""
    engine_busy_s: float
    places: int
    """That the cache allows."""
    running: int
    """At the time of reading."""


class Workload:
    """At depth 0 the places never change: what runs together decides the last bits of what is sampled."""

    def __init__(self, config: RolloutConfig, *, pipeline_depth: int) -> None:
        most = max(1, 2 * config.engine.max_num_seqs // config.group_size)
        least = most if pipeline_depth == 0 else 1
        # Asked about twice per group, so a turnover of all places is about that many calls.
        self.control = ConcurrencyControl(most, min_places=least, turnover=2 * most)
        self._read_at = time.monotonic()
        self._busy_s = 0.0
        self.waited_s = 0.0
        """Seconds of waiting for admission since the last reading."""

    def reading(self, load: EngineLoad, running: int) -> WorkerReading:
        """Return what happened since the last call."""
        now = time.monotonic()
        reading = WorkerReading(
            elapsed_s=now - self._read_at,
            admission_wait_s=self.waited_s,
            engine_busy_s=load.busy_s - self._busy_s,
            places=self.control.places,
            running=running,
        )
        self._read_at, self._busy_s, self.waited_s = now, load.busy_s, 0.0
        return reading
