"""Work that the loop need not wait for: done in a thread of its own, one piece after the other."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

Result = TypeVar("Result")


class Backlog:
    """At most `most` pieces are open; whoever adds another one then waits. What a piece raises is raised to whoever
    adds the next one, or waits for all, and once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: deque[Future[object]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="backlog")

    def add(self, work: Callable[[], Result]) -> None:
        """Raises what earlier pieces raised."""
        while self._open and (self._open[0].done() or len(self._open) >= self._most):
            self._open.popleft().result()
        self._open.append(self._thread.submit(work))

    def finish(self) -> None:
        """Wait until all is done. Raises what a piece raised, the first one first, once all have ended."""
        wait(self._open)
        while self._open:
            self._open.popleft().result()

    def close(self) -> None:
        """As `finish`; nothing can be added any more."""
        self._thread.shutdown()
        self.finish()
