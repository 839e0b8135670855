"""An event loop whose clock jumps to the next timer instead of waiting."""

import asyncio
import math
import selectors


class NothingWillHappenError(RuntimeError):
    """Every task waits and no timer is set: in real time the program would hang."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop for code that waits only for itself, never for a thread or a socket."""

    def __init__(self):
        self._jumps = _JumpingSelector()
        super().__init__(self._jumps)

    def time(self):
        return self._jumps.now


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        if timeout is not None and timeout <= 0:
            return []
        if timeout is None:
            raise NothingWillHappenError(f"at {self.now:.3f} s of virtual time every task waits and no timer is set")
        # The loop runs timers that are due before now. Beyond 10^7 s the resolution that it adds rounds to nothing.
        self.now = math.nextafter(self.now + timeout, math.inf)
        return []


def run_in_virtual_time(main):
    """Run a coroutine like `asyncio.run`, with a clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
