"""Processes that run scorers: one that hangs, even with Python's lock held, is killed at its limit."""

import asyncio
import inspect
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import cast

from configs.errors import UserError
from configs.plugins import OwnCodeError, failure, in_a_thread

START_LIMIT_S = 120.0
"""For the start of the process and the import of a scorer's module."""
GRACE_S = 1.0
"""What a process may take beyond a limit to say that the limit is over."""

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from reward.scorers.process import main; main()"
_NUMBERS = count()


class ScoringError(UserError):
    """A scorer failed, or gave no score in time. The attempt is unscored, never wrong."""


class _Call:
    """One question to a process."""

    def __init__(self) -> None:
        self.replies: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self.crowded = False
        """Whether another call ran beside it, which may be the one that made the process hang."""


class _Child:
    """A started process. Its replies are sorted by a thread, which ends with it."""

    def __init__(self, memory: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # With a limit of memory the environment is empty, too: no keys, no proxies.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno()), str(memory)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"PATH": os.defpath, "OMP_NUM_THREADS": "1"} if memory else None,
            )
        self._connection = Connection(ours.detach())
        self.calls: dict[int, _Call] = {}
        self.retired = False
        """Whether a call that nothing can end still runs in it, so that it takes no further ones."""
        threading.Thread(target=self._sort, daemon=True, name="replies of scorers").start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, number: int, call: _Call, *question: object) -> None:
        self.calls[number] = call
        try:
            self._connection.send((number, *question))
        except OSError:
            self.kill()
            call.replies.put(("lost", None))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _sort(self) -> None:
        try:
            while True:
                number, *reply = self._connection.recv()
                if call := self.calls.get(number):
                    call.replies.put((reply[0], reply[1]))
        except (EOFError, OSError):
            self.kill()
            for call in tuple(self.calls.values()):
                call.replies.put(("lost", None))


class ScoringProcess:
    """A process that starts with the first call, and again after it was killed. Thread-safe.

    A `serial` one takes one call at a time. With `memory` its address space is limited to as many bytes, and it knows
    no variable of the environment.
    """

    def __init__(self, *, serial: bool = False, memory: int = 0) -> None:
        self._turn: AbstractContextManager[object] = threading.Lock() if serial else nullcontext()
        self._memory = memory
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def ask(
        self, load: Callable[..., object], source: str, arguments: Sequence[object], limit_s: float
    ) -> tuple[str, object, bool]:
        """Call `load(source)(*arguments)` and return how it ended, with what, and whether other calls ran beside it.

        It ends `done` with a value; `failed` with a reason; `broken` if `load` failed, with a reason; `late` beyond its
        limit, whose time starts when the function is loaded; or `lost` if the process ended, with a value if it had to
        be killed because it did not answer in time.
        """
        with self._turn:
            number, call = next(_NUMBERS), _Call()
            child = self._with(number, call, load, source, arguments, limit_s)
            kind, value = "started", None
            for limit in (START_LIMIT_S, limit_s + GRACE_S):
                if kind == "started":
                    try:
                        kind, value = call.replies.get(timeout=limit)
                    except Empty:
                        child.kill()
                        kind, value = "lost", "in time"
            with self._lock:
                del child.calls[number]
                child.retired |= kind == "late" and value is True
                if child.retired and not child.calls:
                    child.kill()
            return kind, value, call.crowded

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._child is not None:
                self._child.kill()

    def _with(self, number: int, call: _Call, *question: object) -> _Child:
        """Return the process that the question was sent to."""
        with self._lock:
            child = self._child
            if child is None or child.retired or not child.alive:
                child = self._child = _Child(self._memory)
            child.send(number, call, *question)
            if len(child.calls) > 1:
                for one in child.calls.values():
                    one.crowded = True
            return child


_TOGETHER, _ALONE = ScoringProcess(), ScoringProcess(serial=True)
CUSTOM_PROCESSES = (_TOGETHER, _ALONE)
"""Custom scorers run side by side. If the process hangs, what ran in it is tried again one by one in the second."""


def scored(
    load: Callable[..., object],
    source: str,
    arguments: Sequence[object],
    *,
    limit_s: float,
    what: str,
    advice: str = "",
    processes: Sequence[ScoringProcess] = CUSTOM_PROCESSES,
) -> object:
    """Return `load(source)(*arguments)`, computed in the first process that neither hangs nor ends for another's sake.

    Raises OwnCodeError if the function cannot be loaded, and ScoringError, which begins with `what`, if it fails.
    """
    for process in processes:
        kind, value, crowded = process.ask(load, source, arguments, limit_s)
        if kind != "lost" or not crowded:
            break
    if kind == "done":
        return value
    if kind == "broken":
        raise OwnCodeError(str(value))
    if kind == "failed":
        raise ScoringError(f"{what} {value}")
    if kind == "lost" and not value:
        raise ScoringError(f"{what} ended its process")
    raise ScoringError(f"{what} gave no score within {limit_s:g} s{advice}")


def main() -> None:
    """Answer questions until the other side ends."""
    connection, memory = Connection(int(sys.argv[2])), int(sys.argv[3])
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    loop, running, sending = asyncio.new_event_loop(), set[int](), threading.Lock()
    # One loop for all, so that clients that scorers share keep their connections.
    threading.Thread(target=loop.run_forever, daemon=True, name="asynchronous scorers").start()

    def send(number: int, kind: str, value: object) -> None:
        with sending:
            connection.send((number, kind, value))

    async def answer(
        number: int, load: Callable[..., object], source: str, arguments: Sequence[object], limit_s: float
    ) -> None:
        try:
            function = cast(Callable[..., object], await in_a_thread(load, source))
            send(number, "started", None)
            running.add(number)
            # Should the other side be gone and the lock be held, the kernel ends this process.
            signal.setitimer(signal.ITIMER_REAL, limit_s + 2 * GRACE_S)
            send(number, *await _called(function, arguments, limit_s))
        except Exception as error:
            send(number, "broken", str(error))
        running.discard(number)
        if not running:
            signal.setitimer(signal.ITIMER_REAL, 0)

    try:
        while True:
            asyncio.run_coroutine_threadsafe(answer(*connection.recv()), loop)
    finally:
        # Threads that hang would hold up the end.
        os._exit(0)


async def _called(function: Callable[..., object], arguments: Sequence[object], limit_s: float) -> tuple[str, object]:
    """Call a function in a thread and await its result if needed. Return how it ended, and with what."""
    is_thread = True
    try:
        async with asyncio.timeout(limit_s) as limit:
            found = await in_a_thread(function, *arguments)
            is_thread = False
            return "done", await found if inspect.isawaitable(found) else found
    except Exception as error:
        if limit.expired():
            return "late", is_thread
        return "failed", str(error) if isinstance(error, ScoringError) else f"failed with {failure(error)}"
