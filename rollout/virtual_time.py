"""Virtual time: an event loop in which sleeping takes no time, so that real asyncio code can be simulated.

The clock stands still while code runs and jumps to the next timer when all of it waits. Nothing depends on the speed of
the machine, so a simulation is as deterministic as its random numbers.
"""

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class NothingWillHappenError(RuntimeError):
    """Everything waits and no timer is set: in real time the program would hang."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that waits only for itself. A thread or a socket answers in real time, which never passes here."""

    def __init__(self) -> None:
        self._jumps = _JumpingSelector()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now


class _JumpingSelector(selectors.DefaultSelector):
    """Where the loop would wait for the outside world, time moves on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []
        if timeout is None:
            raise NothingWillHappenError(
                f"at {self.now:.3f} s of virtual time everything waits and no timer is set; a waiter is never woken"
            )
        # The loop runs what is due before now, not at it: beyond 10^7 s the resolution that it adds rounds to nothing.
        self.now = math.nextafter(self.now + timeout, math.inf)
        return []


def run_in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`; the clock begins at 0. Raises NothingWillHappenError instead of hanging."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
