"""Runs Python code behind kernel walls: one zygote, started from a clean environment, and episodes forked from it."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from configs.errors import UserError
from envs.sandbox.episode import Episode, IdleMemory, SandboxFaultError
from envs.sandbox.frames import READY, receive_frame, send_frame
from envs.sandbox.scratch import remove_folder, scratch_parent
from envs.sandbox.settings import SandboxSettings, Tier, refusal
from envs.types import ToolResult, ToolUnavailableError

_PACKAGES = ("numpy", "sympy", "mpmath")
_START_TIMEOUT_S = 60.0
# By way of the working directory, so that no module of the sandbox knows where on the host it lies.
_BOOT = "import sys; sys.path.append('/proc/self/cwd'); from envs.sandbox.zygote import main; main()"
_FLAGS = ("-s", "-P", "-S", "-X", "utf8", "-W", "ignore::SyntaxWarning", "-W", "ignore::DeprecationWarning")
# The only variables: fixed hashes, and one thread, because a process with threads cannot be forked safely.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_PROOF_TIMEOUT_S = 30.0


class SandboxRefusedError(UserError):
    """This machine gives no tier of the sandbox that the settings allow, so nothing is run at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxState:
    """Which walls a sandbox has. `without` says what the machine lacks for the tier that was passed over."""

    tier: Tier
    layers: tuple[str, ...]
    without: str

    def __str__(self) -> str:
        said = f"tier {self.tier} ({', '.join(self.layers)})"
        return f"{said}; without {self.without}" if self.without else said


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


class ZygoteProcess:
    def __init__(self, settings: SandboxSettings) -> None:
        """A plain subprocess: code between fork and exec would be unsafe in a host with threads."""
        self._link, inside = socket.socketpair()
        with inside:
            self._process = subprocess.Popen(
                [sys.executable, *_FLAGS, "-c", _BOOT],
                env=_ENVIRONMENT,
                cwd=Path(__file__).parents[2],
                stdin=inside.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._scratch: str | None = None
        try:
            self.state = self._start(settings)
        except BaseException:
            self.close()
            raise

    def _start(self, settings: SandboxSettings) -> "SandboxState":
        self._link.settimeout(_START_TIMEOUT_S)
        order = {
            "settings": asdict(settings),
            "packages": _package_sources(),
            "scratch_parent": str(scratch_parent()),
        }
        try:
            send_frame(self._link, json.dumps(order).encode())
            report = json.loads(receive_frame(self._link))
            if report["tier"] is None:
                raise SandboxRefusedError(refusal(settings.tier, report["lacks"]))
            self._scratch = report["scratch"]
            ready = receive_frame(self._link)
        except (OSError, ValueError) as error:
            raise SandboxRefusedError(f"the sandbox did not start: {error}") from error
        if ready != READY:
            raise SandboxRefusedError(f"the sandbox did not start: {ready.decode(errors='replace')}")
        self._link.settimeout(None)
        passed_over = report["lacks"]["namespaces"] if report["tier"] != "namespaces" else {}
        return SandboxState(
            tier=report["tier"],
            layers=tuple(report["layers"]),
            without="; ".join(f"{layer}: {reason}" for layer, reason in passed_over.items()),
        )

    def open_link(self) -> socket.socket:
        """A connection to a new warden. OSError when the zygote is gone."""
        if self._process.poll() is not None:  # a dying zygote may still take a request, and never answer
            raise ConnectionError("the zygote is gone")
        outside, inside = socket.socketpair()
        outside.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with inside:
            try:
                socket.send_fds(self._link, [b"e"], [inside.fileno()])
            except OSError:
                outside.close()
                raise
        return outside

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()
        self._process.kill()
        self._process.wait()
        if self._scratch is not None:
            remove_folder(self._scratch)


def _package_sources() -> dict[str, str]:
    """Name in the jail -> directory here; wheels of numpy keep their libraries in a sibling."""
    sources: dict[str, str] = {}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise SandboxRefusedError(f"the sandbox needs the package {name}, which is not installed")
        path = os.path.realpath(next(iter(spec.submodule_search_locations)))
        for candidate in (path, f"{path}.libs"):
            if os.path.isdir(candidate):
                sources[os.path.basename(candidate)] = candidate
    return sources
