"""Steps of code that share their names, run in one process of the sandbox, and the memory they hold between steps."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self
from weakref import WeakKeyDictionary

from envs.sandbox.frames import BORN, READY, receive_frame, receive_frame_from, send_frame
from envs.sandbox.outcome import REQUEST_HEADER, parse_reply
from envs.types import ToolResult, ToolUnavailableError

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class IdleMemory:
    """Keeps the sum over all episodes that wait for their next step at or below `max_bytes`: the largest go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Weak: an episode that nobody holds any more ends by itself.
        self._held: WeakKeyDictionary[Episode, int] = WeakKeyDictionary()

    def rest(self, episode: "Episode", num_bytes: int) -> None:
        """The episode's step has ended; its process is stopped and holds so much."""
        with self._lock:
            if not episode.closed:
                self._held[episode] = num_bytes
        while (largest := self._one_too_many()) is not None:
            largest.evict()

    def wake(self, episode: "Episode") -> None:
        """A step of it begins, or it is closed."""
        with self._lock:
            self._held.pop(episode, None)

    def _one_too_many(self) -> "Episode | None":
        with self._lock:
            held = dict(self._held)
            if sum(held.values()) <= self._max_bytes:
                return None
            largest = max(held, key=held.__getitem__)
            del self._held[largest]
            return largest


def resident_bytes(pid: int) -> int:
    """Physical memory of a process, what it shares included; 0 where the process is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


_GRACE_S = 30.0
_RESTARTED = "[The interpreter was restarted: names from earlier steps are gone.]\n"


class SandboxFaultError(Exception):
    """The sandbox's own machinery failed; the code is not to blame."""


class Episode:
    """Steps that share their names. A killed process makes the next step start afresh, and say so."""

    def __init__(
        self,
        open_link: Callable[[], socket.socket],
        slots: AbstractContextManager[object],
        idle: IdleMemory,
        *,
        max_code_bytes: int,
    ) -> None:
        self._open_link = open_link
        self._slots = slots
        self._idle = idle
        self._max_code_bytes = max_code_bytes
        self._busy = threading.Lock()
        self._link: socket.socket | None = None
        self._pid = 0
        self._shared_bytes = 0
        self._held_bytes = 0
        self._holds_names = False
        self._lost_names = False
        self.closed = False

    def run(self, code: str, *, timeout_s: float = 5.0) -> ToolResult:
        if (refusal := _refusal(code, self._max_code_bytes)) is not None:
            return refusal
        try:
            with self._busy, self._slots:
                self._idle.wake(self)
                return self._run(code.encode(), timeout_s)
        finally:
            self._idle.rest(self, self._held_bytes)

    def _run(self, source: bytes, timeout_s: float) -> ToolResult:
        if self.closed:
            raise ToolUnavailableError("the episode is closed")
        try:
            return self._attempt(source, timeout_s)
        except SandboxFaultError as fault:
            # A retry without the earlier names would blame the code for the fault.
            if self._holds_names or self.closed:
                self._lost_names, self._holds_names = self._holds_names, False
                raise ToolUnavailableError(f"the sandbox failed: {fault}") from fault
        try:
            return self._attempt(source, timeout_s)
        except SandboxFaultError as fault:
            raise ToolUnavailableError(f"the sandbox failed twice: {fault}") from fault

    def _attempt(self, source: bytes, timeout_s: float) -> ToolResult:
        try:
            # A local name, because close() may take the attribute away in the middle of this.
            link = self._link = self._link or self._connect()
            if self.closed:
                raise SandboxFaultError("the episode was closed")
            link.settimeout(timeout_s + _GRACE_S)
            send_frame(link, REQUEST_HEADER.pack(timeout_s) + source)
            verdict, text = parse_reply(receive_frame(link))
        except (OSError, ValueError, SandboxFaultError) as error:
            self._hang_up()
            reason = "the episode was closed" if self.closed else str(error)
            raise SandboxFaultError(reason) from error
        except BaseException:  # an interrupt here would leave a reply for the next run to take as its own
            self._hang_up()
            raise
        if self._lost_names:
            text = _RESTARTED + text
        self._holds_names, self._lost_names = verdict.alive, not verdict.alive
        if verdict.alive:
            own = max(0, resident_bytes(self._pid) - self._shared_bytes)
            self._held_bytes = own + verdict.file_bytes
        else:
            self._hang_up()
        return ToolResult(text=text, error=verdict.category or None)

    def _connect(self) -> socket.socket:
        link = self._open_link()
        link.settimeout(_GRACE_S)
        try:
            report, self._pid = receive_frame_from(link)
            if report == BORN:
                report = receive_frame(link)
        except OSError:
            link.close()
            raise
        if report != READY:
            link.close()
            raise SandboxFaultError(report.decode(errors="replace"))
        self._shared_bytes = resident_bytes(self._pid)
        return link

    def evict(self) -> None:
        """End the process between two steps, for its memory; the next step starts afresh, and says so."""
        if self._busy.acquire(blocking=False):
            try:
                if self._holds_names:
                    self._lost_names, self._holds_names = True, False
                    self._hang_up()
            finally:
                self._busy.release()

    def _hang_up(self) -> None:
        self._held_bytes = 0
        link, self._link = self._link, None
        if link is None:
            return
        try:
            link.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side was first
            pass
        finally:
            link.close()

    def close(self) -> None:
        """Ends the process at once, also in the middle of a run."""
        self.closed = True
        self._idle.wake(self)
        self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _refusal(code: str, max_code_bytes: int) -> ToolResult | None:
    try:
        num_bytes = len(code.encode())
    except UnicodeEncodeError:
        return ToolResult(text="SyntaxError: the code holds half a surrogate pair", error="syntax")
    if "\0" in code:
        return ToolResult(text="SyntaxError: the code holds a null byte", error="syntax")
    if num_bytes > max_code_bytes:
        text = f"The code has {num_bytes} bytes; at most {max_code_bytes} are allowed."
        return ToolResult(text=text, error="too-large")
    return None
