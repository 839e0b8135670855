"""An event loop whose clock jumps to the next timer instead of waiting for it."""

import asyncio
import math
import selectors


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that waits only for itself: a thread or a socket answers in real time, which never passes here."""

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
        if timeout is None:
            raise RuntimeError(f"at {self.now:.3f} s everything waits and no timer is set")
        if timeout > 0:
            # The loop runs timers that are due before now, not at it.
            self.now = math.nextafter(self.now + timeout, math.inf)
        return []


def run_in_virtual_time(main):
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
