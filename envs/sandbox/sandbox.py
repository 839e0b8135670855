"""Runs Python code behind kernel walls, once or as the steps of an episode."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from envs.sandbox.frames import FrameError, receive_frame, send_frame
from envs.sandbox.process import SandboxRefusedError, ZygoteProcess
from envs.sandbox.settings import SandboxSettings
from envs.sandbox.warden import CODE_CATEGORIES, REQUEST_HEADER, WARDEN_CATEGORIES
from envs.types import ToolResult, ToolUnavailableError

_READY = b"ready"
_GRACE_S = 30.0
_RESTARTED = "[The interpreter was restarted: names from earlier steps are gone.]\n"


class SandboxFaultError(Exception):
    """The sandbox's own machinery failed; the code is not to blame."""


class Sandbox:
    """One zygote and any number of episodes; every method may be called from any thread."""

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self.max_concurrent_runs = self.settings.max_concurrent_runs or 2 * (os.cpu_count() or 1)
        self.slots = threading.BoundedSemaphore(self.max_concurrent_runs)
        self.executor = ThreadPoolExecutor(self.max_concurrent_runs, thread_name_prefix="sandbox")
        self._lock = threading.Lock()
        self._closed = False
        self._zygote = ZygoteProcess(self.settings)
        self._prove()

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that are active."""
        return self._zygote.layers

    def run(self, code: str, *, timeout_s: float = 5.0) -> ToolResult:
        """Runs `code` in a fresh interpreter. Raises ToolUnavailableError only for faults of the sandbox."""
        with self.episode() as episode:
            return episode.run(code, timeout_s=timeout_s)

    def episode(self) -> "Episode":
        return Episode(self)

    def open_link(self) -> socket.socket:
        """A connection to a new warden, from a new zygote where the old one is gone."""
        with self._lock:
            if self._closed:
                raise ToolUnavailableError("the sandbox is closed")
            try:
                return self._zygote.open_link()
            except OSError:
                self._zygote.close()
            try:
                self._zygote = ZygoteProcess(self.settings)
                return self._zygote.open_link()
            except (OSError, SandboxRefusedError) as error:
                raise SandboxFaultError(f"the zygote did not restart: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._zygote.close()
        self.executor.shutdown(wait=False)

    def _prove(self) -> None:
        """Layers are applied per process; one real run shows that all of them can be."""
        try:
            result = self.run("6 * 7", timeout_s=_GRACE_S)
        except ToolUnavailableError as error:
            self.close()
            raise SandboxRefusedError(f"the sandbox cannot run code: {error}") from error
        if result != ToolResult(text="42\n"):
            self.close()
            raise SandboxRefusedError(f"the sandbox cannot run code: 6 * 7 gave {result}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Episode:
    """Steps that share their names. A killed process makes the next step start afresh, and say so."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._busy = threading.Lock()
        self._link: socket.socket | None = None
        self._holds_names = False
        self._lost_names = False
        self._closed = False

    def run(self, code: str, *, timeout_s: float = 5.0) -> ToolResult:
        source = code.encode(errors="surrogatepass")
        if (refusal := _refusal(code, self._sandbox.settings.max_code_bytes)) is not None:
            return refusal
        with self._busy, self._sandbox.slots:
            try:
                return self._attempt(source, timeout_s)
            except SandboxFaultError as fault:
                # A retry without the earlier names would blame the code for the fault.
                if self._holds_names or self._closed:
                    self._lost_names, self._holds_names = self._holds_names, False
                    raise ToolUnavailableError(f"the sandbox failed: {fault}") from fault
            try:
                return self._attempt(source, timeout_s)
            except SandboxFaultError as fault:
                raise ToolUnavailableError(f"the sandbox failed twice: {fault}") from fault

    def _attempt(self, source: bytes, timeout_s: float) -> ToolResult:
        try:
            if self._link is None:
                self._link = self._connect()
            self._link.settimeout(timeout_s + _GRACE_S)
            send_frame(self._link, REQUEST_HEADER.pack(timeout_s) + source)
            category, alive, text = _parsed_reply(receive_frame(self._link))
        except (OSError, FrameError, ValueError) as error:
            self._hang_up()
            raise SandboxFaultError(str(error)) from error
        if self._lost_names:
            text = _RESTARTED + text
        self._holds_names, self._lost_names = alive, not alive
        if not alive:
            self._hang_up()
        return ToolResult(text=text, error=category or None)

    def _connect(self) -> socket.socket:
        if self._closed:
            raise ToolUnavailableError("the episode is closed")
        link = self._sandbox.open_link()
        link.settimeout(_GRACE_S)
        try:
            report = receive_frame(link)
        except OSError:
            link.close()
            raise
        if report != _READY:
            link.close()
            raise SandboxFaultError(report.decode(errors="replace"))
        return link

    def _hang_up(self) -> None:
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
        self._closed = True
        self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


def _parsed_reply(reply: bytes) -> tuple[str, bool, str]:
    header, _, text = reply.decode().partition("\n")
    category, _, alive = header.partition("|")
    if category not in CODE_CATEGORIES | WARDEN_CATEGORIES or alive not in ("0", "1"):
        raise ValueError(f"the warden sent an unknown header {header!r}")
    return category, alive == "1", text
