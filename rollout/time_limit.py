"""How long an attempt may take: its own time and its tools', not the time in which the engine works for it.

On a slow or busy machine an attempt waits minutes for its turns. Whether an engine still works is for its heartbeat to
find out; an attempt that would be cut off for it would come again and be cut off again, the longest first.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

Item = TypeVar("Item")


class TimeLimit:
    """A time limit like `asyncio.timeout` whose clock can be stopped. None is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = self._left = seconds
        self._timeout: asyncio.Timeout | None = None
        self._num_pauses = 0

    async def __aenter__(self) -> Self:
        """Start the clock. The end of the block raises TimeoutError if the time was over."""
        self._timeout = asyncio.timeout(self._seconds)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._timeout is not None
        timeout, self._timeout = self._timeout, None
        await timeout.__aexit__(kind, error, trace)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock, until the last of several pauses at the same time has ended."""
        self._num_pauses += 1
        if self._num_pauses == 1 and (timeout := self._running()) and (when := timeout.when()) is not None:
            self._left = when - asyncio.get_running_loop().time()
            timeout.reschedule(None)
        try:
            yield
        finally:
            self._num_pauses -= 1
            if self._num_pauses == 0 and (timeout := self._running()) and self._left is not None:
                timeout.reschedule(asyncio.get_running_loop().time() + self._left)

    def _running(self) -> asyncio.Timeout | None:
        return None if self._timeout is None or self._timeout.expired() else self._timeout


async def side_by_side(items: Iterable[Item], work: Callable[[Item], Awaitable[None]], *, limit: int) -> None:
    """Work on at most `limit` items at a time.

    After an error no item is started, the open ones finish, and the first error is raised.
    """
    remaining, failures = iter(items), list[Exception]()

    async def run() -> None:
        for item in remaining:
            if failures:
                return
            try:
                await work(item)
            except Exception as error:
                failures.append(error)

    await asyncio.gather(*(run() for _ in range(limit)))
    if failures:
        raise failures[0]
