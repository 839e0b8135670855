"""Work that other threads hand to the one that owns an engine."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout.engines.engine import EngineError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Command:
    """Work, and where its result goes."""

    work: Callable[[], object]
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
        self._ended: EngineError | None = None
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Raises EngineError once the thread does no more work, so that nobody waits for it in vain."""
        done: Future[Result] = Future()
        command = _Command(work=work, done=done)
        with self._lock:
            if self._ended is not None:
                raise EngineError(str(self._ended)) from self._ended.__cause__
            self._queue.put(command)
        return done

    def run_all(self, *, idle: Callable[[], bool]) -> None:
        """Run what is queued; while there is nothing else to do (`idle`), sleep until something is. Woken by
        `submit`."""
        while True:
            try:
                command = self._queue.get(block=idle())
            except queue.Empty:
                return
            command.run()

    def end(self, error: EngineError) -> None:
        """Take nothing more, and refuse what waits."""
        with self._lock:
            self._ended = error
        while not self._queue.empty():
            self._queue.get().refuse(error)
