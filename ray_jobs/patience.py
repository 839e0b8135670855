"""How long is too long: bounds from what was measured in the run itself, with a floor."""

from collections import deque
from statistics import median

TIMES_MEDIAN = 20
REMEMBERED = 64


class Patience:
    """`floor_s`: the least bound, so that a part on a busy machine is not taken for one that hangs. `first_s`: the
    bound while nothing was measured; a first call may compile, load or download."""

    def __init__(self, *, floor_s: float, first_s: float) -> None:
        self._floor_s = floor_s
        self._first_s = max(floor_s, first_s)
        self._measured: deque[float] = deque(maxlen=REMEMBERED)

    def observe(self, seconds: float) -> None:
        """What it took this time."""
        self._measured.append(seconds)

    @property
    def bound_s(self) -> float:
        if not self._measured:
            return self._first_s
        return max(self._floor_s, TIMES_MEDIAN * median(self._measured))
