"""The interface of an engine: requests in, completions out, adapters by version; its thread's queue; a time limit."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from configs.errors import UserError
from rollout.types import Completion, Message

BASE_VERSION = -1
"""Policy version of the untouched base model."""


class EngineError(RuntimeError):
    """The engine failed. The trajectory is unscorable, not wrong."""


class ContextFullError(EngineError):
    """The dialogue no longer fits the context of a server's model."""


class BackendError(UserError):
    """A server that cannot be used as configured. No other request can succeed, so it ends the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One model call of a trajectory."""

    trajectory_id: str
    prompt_token_ids: tuple[int, ...]
    """The prompt, for an engine that samples itself."""
    max_tokens: int
    temperature: float
    grammar: str | None = None
    """EBNF source of the reply's form, for an engine that samples itself."""
    use_adapter: bool = True
    """False samples the frozen base model."""
    seed: int | None = None
    """None continues the engine's own random stream."""
    stop: tuple[str, ...] = ()
    """The first of these texts ends the reply. Its tokens stay in the completion's ids; its text does not."""
    messages: tuple[Message, ...] = ()
    """The prompt, for a server that renders and tokenises it."""
    json_schema: Mapping[str, object] | None = None
    """The reply's form, for a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Progress of a component. While something is open, `done` must grow."""

    done: int = 0
    """Work so far, in any unit; an engine counts tokens."""
    num_open: int = 0
    """Requests that are not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Counters of an engine since its start, and gauges of this moment."""

    busy_s: float
    """Seconds spent computing."""
    kv_usage: float
    """Share of the KV cache in use."""
    num_waiting: int
    """Requests that wait for a place."""
    num_preemptions: int
    """Requests that lost their place in the KV cache because it was full."""


class Engine(Protocol):
    """The engine of an agent."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion. Raises EngineError."""
        ...

    def release(self, trajectory_id: str) -> None:
        """Drop the open requests of a trajectory that has ended."""
        ...


Result = TypeVar("Result")


class Commands:
    """Work that other threads queue for the one that owns an engine.

    Other threads call `submit`; the owner calls everything else.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], Future[Any]]] = queue.SimpleQueue()
        self._ended: EngineError | None = None
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue work. Raises EngineError after `end`."""
        done: Future[Result] = Future()
        with self._lock:
            if self._ended is not None:
                raise EngineError(str(self._ended)) from self._ended.__cause__
            self._queue.put((work, done))
        return done

    def run_all(self, *, idle: Callable[[], bool]) -> None:
        """Run the queued work. While `idle` returns true, wait for more.

        A ValueError of the work is a refusal that changed nothing. Any other exception may have left the engine in an
        undefined state: it goes to the caller of `submit` and is raised here too.
        """
        while True:
            try:
                work, done = self._queue.get(block=idle())
            except queue.Empty:
                return
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
                if not isinstance(error, ValueError):
                    raise

    def end(self, error: EngineError) -> None:
        """Refuse new and waiting work with this error."""
        with self._lock:
            self._ended = error
        while not self._queue.empty():
            _, done = self._queue.get()
            if done.set_running_or_notify_cancel():
                done.set_exception(error)


class TimeLimit:
    """How long an attempt may take: its own time and its tools', not the time in which the engine works for it.

    On a busy machine an attempt waits minutes for its turns. Whether an engine still works is for its heartbeat to find
    out; an attempt that was cut off for it would come again and be cut off again, the longest first. So the limit of
    everything together, `wall_seconds`, is a generous one. None is no limit.
    """

    def __init__(self, seconds: float | None, wall_seconds: float | None = None) -> None:
        self._seconds = self._left = seconds
        self._wall_seconds = wall_seconds
        self._timeout: asyncio.Timeout | None = None
        self._num_pauses = 0
        self.is_wall_over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the clock. The end of the block raises TimeoutError if the time was over."""
        wall = asyncio.timeout(self._wall_seconds)
        try:
            async with wall, asyncio.timeout(self._seconds) as self._timeout:
                yield
        finally:
            self.is_wall_over = wall.expired()
            self._timeout = None

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
