"""How many groups a worker may run at once, found from the pressure on its engine's KV cache.

Additive-increase, multiplicative-decrease in the spirit of prime-rl (`src/prime_rl/orchestrator/concurrency.py` at
559b4477), whose thresholds and growth these are. What is different, and why:

- Running work is never cancelled: what takes long is what is hard. A worker above its places admits nothing until
  groups have ended, so pressure subsides more slowly, and none of it counts as new before the excess has ended.
- A trim is a fixed factor, where prime-rl aims at a usage of 0.7. There is no harsher second cut: with nothing to
  cancel it would only lengthen the pause.
- A turnover is a number of observations instead of a share per completion, so that an engine from which nothing
  comes back any more is still cut.
- Queued requests forbid growth and never cut. Workers are meant to run more trajectories than the engine has
  sequences; a queue that comes from a full cache shows as usage and preemptions.
- The first number of places is the configured most, where prime-rl begins at what surely fits: too many costs some
  recomputed prefixes here, too few would idle the engine for many turnovers.
"""

GROW_BELOW = 0.6
"""KV usage under which places are added."""
TRIM_ABOVE = 0.8
CUT_ABOVE = 0.9
GROWTH = 1.25
TRIM = 0.9
CUT = 0.8
TURNOVER = 6
"""Observations from one change to the next, in which the first shows its effect: right where a group takes about as
long as six observations. Who observes whenever a group starts or ends passes about twice the places instead."""


class ConcurrencyControl:
    """A pure state machine, for one engine; between `min_places` and `max_places` whatever it is told."""

    def __init__(
        self, max_places: int, min_places: int = 1, start: int | None = None, *, turnover: int = TURNOVER
    ) -> None:
        start = max_places if start is None else start
        if not 1 <= min_places <= start <= max_places:
            raise ValueError(
                f"places must have 1 <= min <= start <= max, got min {min_places}, start {start}, max {max_places}"
            )
        self._min_places = min_places
        self._max_places = max_places
        self._places = start
        self._turnover = turnover
        self._since_change = turnover
        self._num_preemptions: int | None = None
        self._was_running = 0

    @property
    def places(self) -> int:
        return self._places

    def observe(self, *, kv_usage: float, num_preemptions: int, num_waiting: int, running: int) -> int:
        """The number of places from now on.

        `kv_usage`: share of the KV cache in use. `num_preemptions`: all that the engine ever counted; the first
        observation only sets the mark. `num_waiting`: requests queued in the engine. `running`: groups.
        """
        preempted = self._preempted(num_preemptions)
        # Preemptions happened between two observations, and by now the groups that caused them may have ended.
        loaded = max(running, self._was_running)
        self._was_running = running
        self._since_change += 1
        if self._since_change < self._turnover:
            return self._places
        if preempted or kv_usage > CUT_ABOVE:
            self._shrink(CUT, loaded)
        elif kv_usage > TRIM_ABOVE:
            self._shrink(TRIM, loaded)
        elif kv_usage < GROW_BELOW and num_waiting == 0 and running >= self._places:
            self._change(max(self._places + 1, int(self._places * GROWTH)))
        return self._places

    def _preempted(self, num_preemptions: int) -> bool:
        """Whether there were any since the last observation; a smaller count is that of a restarted engine."""
        before, self._num_preemptions = self._num_preemptions, num_preemptions
        if before is None:
            return False
        return num_preemptions > before or 0 < num_preemptions < before

    def _shrink(self, factor: float, loaded: int) -> None:
        """From what ran, since unused places press on nothing; not while the excess of an earlier change still ran,
        nor where no group can have caused the pressure."""
        if 0 < loaded <= self._places:
            self._change(min(self._places - 1, int(loaded * factor)))

    def _change(self, places: int) -> None:
        places = min(self._max_places, max(self._min_places, places))
        if places != self._places:
            self._places = places
            self._since_change = 0
