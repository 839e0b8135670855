"""Host side of the sandbox: a zygote started from a clean environment, and episodes in processes forked from it."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from configs.errors import UserError
from envs.sandbox.jail import remove_folder
from envs.sandbox.protocol import (
    BORN,
    MAX_CODE_BYTES,
    READY,
    REQUEST_HEADER,
    SandboxSettings,
    Tier,
    parse_reply,
    receive,
    receive_from,
    refusal,
)
from envs.types import ToolResult, ToolUnavailableError

_PACKAGES = ("numpy", "sympy", "mpmath")
_START_TIMEOUT_S = 60.0
# Imports go through the working directory, so that no module of the sandbox has its path on the host.
_BOOT = "import sys; sys.path.append('/proc/self/cwd'); from envs.sandbox.zygote import main; main()"
_FLAGS = ("-s", "-P", "-S", "-X", "utf8", "-W", "ignore::SyntaxWarning", "-W", "ignore::DeprecationWarning")
# All variables of the zygote. One thread: a process with threads cannot be forked safely.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GRACE_S = 30.0
_RESTARTED = "[The interpreter was restarted: names from earlier steps are gone.]\n"


class SandboxRefusedError(UserError):
    """This machine supports no tier of the sandbox that the settings allow, so no code is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxState:
    """The tier and the active layers of a sandbox."""

    tier: Tier
    layers: tuple[str, ...]
    without: str
    """Layers that the machine lacks for the stronger tier, with the reasons; empty in the stronger tier."""

    def __str__(self) -> str:
        text = f"tier {self.tier} ({', '.join(self.layers)})"
        return f"{text}; without {self.without}" if self.without else text


class IdleMemory:
    """Bound on the memory of all episodes between two steps; above it the largest are ended first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Weak: an episode without other references ends by itself.
        self._held: WeakKeyDictionary[Episode, int] = WeakKeyDictionary()

    def rest(self, episode: "Episode", num_bytes: int) -> None:
        """Record the memory of an episode whose step has ended, and end episodes above the bound."""
        evicted = []
        with self._lock:
            if not episode.closed:
                self._held[episode] = num_bytes
            held = dict(self._held)
            while sum(held.values()) > self._max_bytes:
                evicted.append(max(held, key=held.__getitem__))
                del held[evicted[-1]], self._held[evicted[-1]]
        for largest in evicted:
            largest.evict()

    def wake(self, episode: "Episode") -> None:
        """Forget an episode whose next step starts, or that is closed."""
        with self._lock:
            self._held.pop(episode, None)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, shared pages included; 0 if the process is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


class Episode(AbstractContextManager["Episode"]):
    """Steps that share their names. After the end of its process the next step starts a new one and reports it."""

    def __init__(self, sandbox: "Sandbox") -> None:
        self._sandbox = sandbox
        self._busy = threading.Lock()
        self._link: socket.socket | None = None
        self._pid = 0
        self._shared_bytes = 0
        self._held_bytes = 0
        self._holds_names = False
        self._lost_names = False
        self.closed = False

    def run(self, code: str, *, timeout_s: float = 5.0) -> ToolResult:
        try:
            source = code.encode()
        except UnicodeEncodeError:
            return ToolResult(text="SyntaxError: the code holds half a surrogate pair", error="syntax")
        if len(source) > MAX_CODE_BYTES:
            text = f"The code has {len(source)} bytes; at most {MAX_CODE_BYTES} are allowed."
            return ToolResult(text=text, error="too-large")
        try:
            with self._busy:
                self._sandbox.idle.wake(self)
                return self._run(source, timeout_s)
        finally:
            self._sandbox.idle.rest(self, self._held_bytes)

    def _run(self, source: bytes, timeout_s: float) -> ToolResult:
        if self.closed:
            raise ToolUnavailableError("the episode is closed")
        try:
            # A local variable, because close() may clear the attribute concurrently.
            link = self._link = self._link or self._connect()
            if self.closed:
                raise ConnectionError
            link.settimeout(timeout_s + _GRACE_S)
            link.send(REQUEST_HEADER.pack(timeout_s) + source)
            category, alive, file_bytes, text = parse_reply(receive(link))
        except BaseException as fault:
            self._hang_up()  # after an interrupt, too: the next run would read the reply of this one
            if not isinstance(fault, (OSError, ValueError)):
                raise
            reason = "the episode was closed" if self.closed else f"the sandbox failed: {fault}"
            raise ToolUnavailableError(reason) from fault
        if self._lost_names:
            text = _RESTARTED + text
        self._holds_names, self._lost_names = alive, not alive
        if alive:
            self._held_bytes = max(0, resident_bytes(self._pid) - self._shared_bytes) + file_bytes
        else:
            self._hang_up()
        return ToolResult(text=text, error=category or None)

    def _connect(self) -> socket.socket:
        link = self._sandbox.open_link()
        link.settimeout(_GRACE_S)
        try:
            report, self._pid = receive_from(link)
            if report == BORN:
                report = receive(link)
            if report != READY:
                raise ConnectionError(report.decode(errors="replace"))
        except OSError:
            link.close()
            raise
        self._shared_bytes = resident_bytes(self._pid)
        return link

    def evict(self) -> None:
        """End the process between two steps to free its memory."""
        if self._busy.acquire(blocking=False):
            self._hang_up()
            self._busy.release()

    def _hang_up(self) -> None:
        self._lost_names |= self._holds_names
        self._holds_names, self._held_bytes = False, 0
        link, self._link = self._link, None
        if link is not None:
            with link, contextlib.suppress(OSError):  # the other side closed first
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process at once, also during a run."""
        self.closed = True
        self._sandbox.idle.wake(self)
        self._hang_up()

    def __exit__(self, *raised: object) -> None:
        self.close()


class Sandbox(AbstractContextManager["Sandbox"]):
    """A running sandbox, safe for threads. Raises SandboxRefusedError if the machine supports no tier."""

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self.executor = ThreadPoolExecutor(2 * (os.cpu_count() or 1), thread_name_prefix="sandbox")
        """Threads for the runs of a server: the time limit of a waiting run starts when it starts."""
        self.idle = IdleMemory(self.settings.idle_memory_mb << 20)
        self._lock = threading.Lock()
        self._closed = False
        self._zygote = ZygoteProcess(self.settings)
        # Layers are applied per process, so only a real run shows that all of them work.
        try:
            result: object = self.run("6 * 7", timeout_s=30.0)
        except ToolUnavailableError as error:
            result = error
        if result != ToolResult(text="42\n"):
            self.close()
            raise SandboxRefusedError(f"the sandbox cannot run code: 6 * 7 gave {result}")

    @property
    def state(self) -> SandboxState:
        return self._zygote.state

    @property
    def pid(self) -> int:
        """Return the ancestor of all other processes of this sandbox."""
        return self._zygote.process.pid

    def run(self, code: str, *, timeout_s: float = 5.0) -> ToolResult:
        """Run `code` in a fresh interpreter. Raises ToolUnavailableError only for faults of the sandbox."""
        with self.episode() as episode:
            return episode.run(code, timeout_s=timeout_s)

    def episode(self) -> Episode:
        return Episode(self)

    def open_link(self) -> socket.socket:
        """Return a connection to a new warden, from a new zygote if the old one is gone."""
        with self._lock:
            if self._closed:
                raise ToolUnavailableError("the sandbox is closed")
            with contextlib.suppress(ConnectionError):
                if self._zygote.process.poll() is None:  # a dying one may take a request, and never answer
                    return self._zygote.open_link()
            self._zygote.close()
            try:
                self._zygote = ZygoteProcess(self.settings)
            except SandboxRefusedError as error:
                raise ConnectionError(f"the zygote did not restart: {error}") from error
            return self._zygote.open_link()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._zygote.close()
        self.executor.shutdown(wait=False)

    def __exit__(self, *raised: object) -> None:
        self.close()


class ZygoteProcess:
    """The zygote as a plain subprocess: code between fork and exec would be unsafe in a host with threads."""

    def __init__(self, settings: SandboxSettings) -> None:
        # Messages arrive as they were sent, neither split nor joined.
        self._link, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with inside:
            self.process = subprocess.Popen(
                [sys.executable, *_FLAGS, "-c", _BOOT],
                env=_ENVIRONMENT,
                cwd=Path(__file__).parents[2],
                stdin=inside.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._scratch: str | None = None
        self._link.settimeout(_START_TIMEOUT_S)
        try:
            parent = tempfile.gettempdir()
            request = {"settings": asdict(settings), "packages": _package_sources(), "scratch_parent": parent}
            self._link.send(json.dumps(request).encode())
            report = json.loads(receive(self._link))
            if report["tier"] is None:
                raise SandboxRefusedError(refusal(settings.tier, report["lacks"]))
            self._scratch = report["scratch"]
            if (ready := receive(self._link)) != READY:
                raise ConnectionError(ready.decode(errors="replace"))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | ValueError):
                raise SandboxRefusedError(f"the sandbox did not start: {error}") from error
            raise
        self._link.settimeout(None)
        passed_over = report["lacks"]["namespaces"] if report["tier"] != "namespaces" else {}
        self.state = SandboxState(
            tier=report["tier"],
            layers=tuple(report["layers"]),
            without="; ".join(f"{layer}: {reason}" for layer, reason in passed_over.items()),
        )

    def open_link(self) -> socket.socket:
        """Return a connection to a new warden. Raises OSError if the zygote is gone."""
        outside, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with inside:
            outside.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            socket.send_fds(self._link, [b"e"], [inside.fileno()])
        return outside

    def close(self) -> None:
        self._link.close()
        self.process.kill()
        self.process.wait()
        remove_folder(self._scratch)


def _package_sources() -> dict[str, str]:
    """Return the directories of the packages by their names in the jail."""
    sources: dict[str, str] = {}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        path = os.path.dirname(os.path.realpath(spec.origin))
        for candidate in (path, f"{path}.libs"):  # wheels of numpy have their libraries in a sibling
            if os.path.isdir(candidate):
                sources[os.path.basename(candidate)] = candidate
    return sources
