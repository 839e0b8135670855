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

Load = Callable[[str], tuple[Callable[..., object], Callable[..., object]]]
"""From a name to a function, whose result may be awaitable, and the check of its result."""


class ScoringError(UserError):
    """A scorer failed, or gave no score in time. The attempt is unscored, never wrong."""


class _Child:
    """A started process. A thread receives its replies, and ends with it."""

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
        self._sending = threading.Lock()
        self._replies: dict[int, SimpleQueue[tuple[str, object]]] = {}
        self._is_stuck = False
        threading.Thread(target=self._receive, daemon=True, name="replies of scorers").start()

    @property
    def is_usable(self) -> bool:
        return not self._is_stuck and self._process.poll() is None

    def ask(self, load: Load, source: str, arguments: Sequence[object], limit_s: float) -> tuple[str, object]:
        """Call the function with the arguments and return how it ended, and with what.

        It ends `done` with a value; `failed` or, in `load`, `broken` with a reason; `late` beyond its limit, or `stuck`
        if it still runs then; `lost` if the process ended; or `hung` if it was killed because it did not answer.
        """
        number = next(_NUMBERS)
        replies = self._replies[number] = SimpleQueue()
        try:
            with self._sending:
                self._connection.send((number, sys.path, load, source, arguments, limit_s))
            kind, value = replies.get(timeout=START_LIMIT_S)
            if kind == "started":
                kind, value = replies.get(timeout=limit_s + GRACE_S)
        except OSError:
            return "lost", None
        except Empty:
            self.kill()
            return "hung", None
        # The process ends after its last call, so it takes no further ones.
        self._is_stuck |= kind == "stuck"
        return kind, value

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _receive(self) -> None:
        try:
            while True:
                number, kind, value = self._connection.recv()
                replies = self._replies[number] if kind == "started" else self._replies.pop(number)
                replies.put((kind, value))
        except (EOFError, OSError):
            self.kill()
            for replies in tuple(self._replies.values()):
                replies.put(("lost", None))


_CHILDREN: dict[int, _Child] = {}
"""The process for each limit of memory."""
_STARTING, _ALONE = threading.Lock(), threading.Lock()


def scored(
    load: Load,
    source: str,
    arguments: Sequence[object],
    *,
    limit_s: float,
    what: str,
    advice: str = "",
    memory: int = 0,
) -> object:
    """Return the checked result of a function, called in a process, and once more in another if that ends or hangs.

    Calls run side by side in one process, with at most `memory` bytes, if any. Raises OwnCodeError if the function
    cannot be loaded, and ScoringError, which begins with `what`, if it fails.
    """
    with _STARTING:
        child = _CHILDREN.get(memory)
        if child is None or not child.is_usable:
            child = _CHILDREN[memory] = _Child(memory)
    kind, value = child.ask(load, source, arguments, limit_s)
    if kind in ("lost", "hung"):
        # Another call may have been the cause, so this one is tried alone.
        with _ALONE:
            alone = _Child(memory)
            kind, value = alone.ask(load, source, arguments, limit_s)
            alone.kill()
    if kind == "done":
        return value
    if kind == "broken":
        raise OwnCodeError(str(value))
    problems = {"failed": value, "lost": "ended its process"}
    raise ScoringError(f"{what} {problems.get(kind) or f'gave no score within {limit_s:g} s{advice}'}")


def main() -> None:
    """Answer questions until the other side ends."""
    connection, memory = Connection(int(sys.argv[2])), int(sys.argv[3])
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    loop, running, stuck = asyncio.new_event_loop(), set[int](), set[int]()

    def receive() -> None:
        try:
            while True:
                asyncio.run_coroutine_threadsafe(answer(*connection.recv()), loop)
        finally:
            # Threads that hang would hold up the end.
            os._exit(0)

    async def answer(
        number: int, path: list[str], load: Load, source: str, arguments: Sequence[object], limit_s: float
    ) -> None:
        running.add(number)
        # Folders may have been added since the start.
        sys.path[:] = path
        # If the other side is gone and a scorer holds the lock, the kernel ends this process.
        signal.setitimer(signal.ITIMER_REAL, max(START_LIMIT_S + limit_s, *signal.getitimer(signal.ITIMER_REAL)))
        try:
            function, check = cast(tuple[Callable[..., object], ...], await in_a_thread(load, source))
            connection.send((number, "started", None))
            kind, value = await _called(function, check, arguments, limit_s)
        except Exception as error:
            kind, value = "broken", str(error)
        connection.send((number, kind, value))
        running.discard(number)
        if kind == "stuck":
            stuck.add(number)
        if not running:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if stuck:
                # Nothing ends the thread of a function but the end of its process.
                os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    # One loop for all, so that clients that scorers share keep their connections.
    loop.run_forever()


async def _called(
    function: Callable[..., object], check: Callable[..., object], arguments: Sequence[object], limit_s: float
) -> tuple[str, object]:
    """Call a function in a thread, await its result if needed, and return how it ended, and with what."""
    late = "stuck"
    try:
        async with asyncio.timeout(limit_s) as limit:
            found = await in_a_thread(function, *arguments)
            late = "late"
            return "done", check(await found if inspect.isawaitable(found) else found)
    except Exception as error:
        if limit.expired():
            return late, None
        return "failed", str(error) if isinstance(error, ScoringError) else f"failed with {failure(error)}"
