"""Calls that are woken together go on a few at a time."""

import asyncio
from collections import deque

AT_ONCE = 16
REST_S = 0.005
MOST_LATE = 4


class Turns:
    """Keeps the event loop free for others while a thousand calls that waited for one thing go on.

    The first few go on at once, then as many again whenever the loop has come round in time: an answer costs more than
    the call's own code, and a late loop shows it. A loop that stays late is given the next ones all the same.
    """

    def __init__(self) -> None:
        self._free = AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._resting = False

    async def turn(self) -> None:
        """Returns when it is the caller's turn, in the order of calls."""
        if self._free:
            self._free -= 1
            self._rest(0)
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        await mine

    def _rest(self, num_late: int) -> None:
        if not self._resting:
            self._resting = True
            loop = asyncio.get_running_loop()
            loop.call_later(REST_S, self._go_on, loop.time() + REST_S, num_late)

    def _go_on(self, due: float, num_late: int) -> None:
        self._resting = False
        if asyncio.get_running_loop().time() - due > REST_S and num_late < MOST_LATE:
            self._rest(num_late + 1)
            return
        self._free = AT_ONCE
        while self._free and self._waiting:
            mine = self._waiting.popleft()
            if not mine.done():  # whoever asked is gone
                self._free -= 1
                mine.set_result(None)
        if self._free < AT_ONCE:
            self._rest(0)
