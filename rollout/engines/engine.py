"""The interface of an engine: requests in, completions out; its thread's queue; the time limit of an attempt."""

import asyncio
import math
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
    """A server that cannot be used as configured, which ends the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One model call of a trajectory."""

    trajectory_id: str
    prompt_token_ids: tuple[int, ...]
    """For an engine that samples itself."""
    max_tokens: int
    temperature: float
    grammar: str | None = None
    """The reply's form in EBNF, for an engine that samples itself."""
    use_adapter: bool = True
    """False samples the frozen base model."""
    seed: int | None = None
    """None continues the engine's own random stream."""
    stop: tuple[str, ...] = ()
    """The first of these texts ends the reply. Only its tokens stay, in the completion's ids."""
    messages: tuple[Message, ...] = ()
    """The prompt, for a server."""
    json_schema: Mapping[str, object] | None = None
    """The reply's form, for a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Progress of a component, in any unit; an engine counts tokens. While something is open, `done` must grow."""

    done: int = 0
    num_open: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Counters of an engine since its start, and gauges of this moment."""

    busy_s: float
    """Spent computing."""
    kv_usage: float
    """Share of the KV cache in use."""
    num_waiting: int
    """Requests that wait for a place."""
    num_preemptions: int
    """Requests that lost their place in the full KV cache."""


class Engine(Protocol):
    """The engine of an agent. `release` drops the open requests of a trajectory that has ended."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion. Raises EngineError."""
        ...

    def release(self, trajectory_id: str) -> None: ...


Result = TypeVar("Result")


class Commands:
    """Work that other threads `submit` to the one that owns an engine, which calls everything else."""

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

        A ValueError is a refusal that changed nothing. Any other exception may have left the engine in an undefined
        state: it goes to the caller of `submit` and is raised here too.
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


class TimeLimitError(TimeoutError):
    """An attempt that took too long. The message names the setting."""


class TimeLimit:
    """How long an attempt may take: its own time and its tools', not the time in which the engine works for it.

    Whether an engine still works is for its heartbeat to find out. An attempt that was cut off for a busy engine would
    come again and be cut off again, so the limit of everything together, `wall_seconds`, is a generous one.
    """

    def __init__(self, seconds: float = math.inf, wall_seconds: float = math.inf) -> None:
        self._seconds = self._left = seconds
        self._wall = wall_seconds
        self._resumed = self._wall_end = 0.0
        self._timeout: asyncio.Timeout | None = None
        self._num_pauses = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the clock. Raises TimeLimitError at the end of the block if the time was over."""
        loop = asyncio.get_running_loop()
        self._resumed = loop.time()
        self._wall_end = self._resumed + self._wall
        try:
            async with asyncio.timeout(None) as timeout:
                self._timeout = timeout
                self._reschedule()
                yield
        except TimeoutError:
            if not timeout.expired():
                # Something else in the block had a time limit of its own.
                raise
            over = f"rollout.episode_timeout_s = {self._seconds:g}"
            if loop.time() >= self._wall_end:
                over = f"rollout.wall_timeout_s = {self._wall:g}"
            raise TimeLimitError(f"the attempt took longer than {over}") from None
        finally:
            self._timeout = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock, until the last of several pauses at the same time has ended."""
        loop = asyncio.get_running_loop()
        if self._timeout is not None and not self._num_pauses:
            self._left -= loop.time() - self._resumed
        self._num_pauses += 1
        self._reschedule()
        try:
            yield
        finally:
            self._num_pauses -= 1
            self._resumed = loop.time()
            self._reschedule()

    def _reschedule(self) -> None:
        if self._timeout is None or self._timeout.expired():
            return
        end = self._wall_end if self._num_pauses else min(self._resumed + self._left, self._wall_end)
        self._timeout.reschedule(None if math.isinf(end) else end)
