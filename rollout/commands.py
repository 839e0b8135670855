"""Work that other threads hand to the engine's thread, done in the order in which it came."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn

from rollout.engine import EngineError


@dataclass(frozen=True, slots=True)
class _Command:
    """Work, and where its result goes."""

    work: Callable[[], Any]
    done: Future[Any]

    def run(self) -> None:
        """A ValueError is a refusal that changed nothing. Anything else may have stopped half-way, and is raised."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.work())
        except Exception as error:
            self.done.set_exception(error)
            if not isinstance(error, ValueError):
                raise

    def refuse(self, error: Exception) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class Commands:
    """`submit` is for the other threads, everything else for the one that does the work."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self.failure: BaseException | None = None

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        if self.failure is not None:
            raise EngineError(f"the engine stopped earlier: {self.failure!r}") from self.failure
        command = _Command(work=work, done=Future())
        self._queue.put(command)
        return command.done

    def run_all(self, *, idle: Callable[[], bool]) -> None:
        """Run what is queued; while there is nothing else to do (`idle`), sleep until something is. Woken by
        `submit`."""
        while True:
            try:
                command = self._queue.get(block=idle())
            except queue.Empty:
                return
            command.run()

    def stop(self, failure: BaseException) -> EngineError:
        """Take nothing more; returns what to tell those who wait."""
        self.failure = failure
        return EngineError(f"the engine stopped: {failure!r}")

    def refuse_all(self, error: EngineError) -> NoReturn:
        """For ever: one that was handed in while the thread stopped may not be waited for in vain."""
        while True:
            self._queue.get().refuse(error)
