"""Runs Python code behind kernel walls: one zygote, and the episodes forked from it."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from envs.sandbox.episode import Episode, IdleMemory, SandboxFaultError
from envs.sandbox.process import SandboxRefusedError, SandboxState, ZygoteProcess
from envs.sandbox.settings import SandboxSettings
from envs.types import ToolResult, ToolUnavailableError

_PROOF_TIMEOUT_S = 30.0


class Sandbox:
    """Every method may be called from any thread. Raises SandboxRefusedError where the machine gives no tier."""

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self.max_concurrent_runs = self.settings.max_concurrent_runs or 2 * (os.cpu_count() or 1)
        self._slots = threading.BoundedSemaphore(self.max_concurrent_runs)
        self.executor = ThreadPoolExecutor(self.max_concurrent_runs, thread_name_prefix="sandbox")
        self._idle = IdleMemory(self.settings.idle_memory_mb << 20)
        self._lock = threading.Lock()
        self._closed = False
        self._zygote = ZygoteProcess(self.settings)
        self._prove()

    @property
    def state(self) -> SandboxState:
        """The tier and the layers that are active."""
        return self._zygote.state

    @property
    def pid(self) -> int:
        """The process that all others of this sandbox descend from."""
        return self._zygote.pid

    def run(self, code: str, *, timeout_s: float = 5.0) -> ToolResult:
        """Runs `code` in a fresh interpreter. Raises ToolUnavailableError only for faults of the sandbox."""
        with self.episode() as episode:
            return episode.run(code, timeout_s=timeout_s)

    def episode(self) -> Episode:
        return Episode(self._open_link, self._slots, self._idle, max_code_bytes=self.settings.max_code_bytes)

    def _open_link(self) -> socket.socket:
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
            result = self.run("6 * 7", timeout_s=_PROOF_TIMEOUT_S)
        except ToolUnavailableError as error:
            self.close()
            raise SandboxRefusedError(f"the sandbox cannot run code: {error}") from error
        if result != ToolResult(text="42\n"):
            self.close()
            raise SandboxRefusedError(f"the sandbox cannot run code: 6 * 7 gave {result}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
