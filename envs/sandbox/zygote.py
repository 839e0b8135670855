"""The clean process from which all code processes are forked: it is jailed, holds no secret, and only forks."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from envs import kernel
from envs.sandbox import jail
from envs.sandbox.cell import CellPlan
from envs.sandbox.protocol import (
    ALLOWED_IMPORTS,
    LAYERS,
    READY,
    SandboxSettings,
    Tier,
    choose_tier,
    receive,
)
from envs.sandbox.warden import run_warden

# Libraries outside the jail that compiled modules load by name; a library that is loaded already needs no file.
_FOREIGN_LIBRARIES = (
    *("libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1"),
    *("libgcc_s.so.1", "libstdc++.so.6"),
)
_FOREIGN_MODULES = ("zlib", "bz2", "lzma", "hashlib", "_strptime")
_ZYGOTE_GRACE_S = 20.0


def main() -> NoReturn:
    """Start the zygote as process 1 of the jail, whose processes all end with it; this process only watches."""
    # The code can read these values, which contain folders and user names of the host.
    os.chdir("/")
    sys.executable = sys._base_executable = ""  # type: ignore[attr-defined]
    sys.argv[:] = sys.orig_argv[:] = []
    # The setting is inherited, and under a host that ignores the signal no child could be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    host = os.pidfd_open(os.getppid())
    link = socket.socket(fileno=0)
    request = json.loads(receive(link))
    settings = SandboxSettings(**request["settings"])
    with contextlib.suppress(OSError):  # without /proc the kernel selects by size alone whom it kills first
        Path("/proc/self/oom_score_adj").write_text("500")
    for name in _FOREIGN_LIBRARIES:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
    for name in _FOREIGN_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    version = kernel.landlock_version()
    lacks = _missing_layers(request["packages"], version)
    tier = choose_tier(settings.tier, lacks)
    scratch = jail.make_scratch(request["scratch_parent"]) if tier == "landlock" else None
    absent = {*settings.disabled_layers, "" if version else "landlock", "namespaces" if tier == "landlock" else ""}
    layers = [layer for layer in LAYERS if layer not in absent]
    link.send(json.dumps({"tier": tier, "lacks": lacks, "layers": layers, "scratch": scratch}).encode())
    if tier is None:
        os._exit(1)
    if tier == "namespaces":
        jail.enter_jail(request["packages"])
    zygote = os.fork()
    if zygote:
        link.close()
        _watch(host, zygote, scratch)
    os.close(host)
    if scratch is None:
        kernel.die_with_parent(signal.SIGKILL)
    _be_zygote(link, settings, layers, request["packages"], scratch)


def _watch(host: int, zygote: int, scratch: str | None) -> NoReturn:
    """Wait for the end of the host or the zygote by descriptor: a parent-death signal is bound to a thread."""
    ended = os.pidfd_open(zygote)
    select.select([host, ended], [], [])
    if scratch is not None:
        # After the host the zygote ends in order. If it were killed here and this process next, no process would remove
        # the files.
        select.select([ended], [], [], _ZYGOTE_GRACE_S)
        os.kill(zygote, signal.SIGKILL)
        os.waitpid(zygote, 0)
    jail.remove_folder(scratch)
    os._exit(0)


def _be_zygote(
    link: socket.socket, settings: SandboxSettings, layers: list[str], packages: Mapping[str, str], scratch: str | None
) -> NoReturn:
    """Serve the host. `scratch` is the parent of the episodes' folders in the tier without separate mounts."""
    try:
        standard = jail.python_directories()
        if scratch is None:
            sys.path[:] = readable = [*standard, jail.PACKAGES_DIR]
        else:
            sys.path[:] = [*standard, *sorted({os.path.dirname(path) for path in packages.values()})]
            # Entries of the standard library one by one: a rule for the folder would allow installed packages.
            entries = [entry for folder in standard for entry in os.scandir(folder)]
            readable = [entry.path for entry in entries if entry.name not in jail.INSTALLED] + [*packages.values()]
        sys.path_importer_cache.clear()
        _import_everything()
        link.send(READY)
        plan = CellPlan(settings=settings, layers=layers, readable=readable)
        _Wardens(link, plan, scratch).fork_on_demand()
    except Exception:
        with contextlib.suppress(OSError):
            link.send(traceback.format_exc().encode())
    finally:
        jail.remove_folder(scratch)
        os._exit(0)


class _Wardens:
    """Living wardens by descriptor, each with the folder of its episode, which is removed after it."""

    def __init__(self, link: socket.socket, plan: CellPlan, scratch: str | None) -> None:
        self._link = link
        self._plan = plan
        self._scratch = scratch
        self._folders: dict[int, str | None] = {}
        self._parent: int | None = None
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        if scratch is not None:
            # Watch the watcher, to end in order after it: the survivor of the two removes the files. Both can be killed
            # together with the host, because Ray kills the children of a worker.
            self._parent = os.pidfd_open(os.getppid())
            self._poll.register(self._parent, select.POLLIN)

    def fork_on_demand(self) -> None:
        """Serve until the host hangs up or the watched parent is gone, then kill the wardens."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps, orphaned cells too
        while True:
            for ready, _ in self._poll.poll():
                if ready in self._folders:
                    self._poll.unregister(ready)
                    os.close(ready)
                    jail.remove_folder(self._folders.pop(ready))
                elif ready == self._parent or not self._serve():
                    for warden in self._folders:
                        with contextlib.suppress(ProcessLookupError):
                            signal.pidfd_send_signal(warden, signal.SIGKILL)
                    return

    def _serve(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._link, 1, 1)
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # without a process the host reads the end of its connection
                self._fork(descriptor)
            os.close(descriptor)
        return bool(message)

    def _fork(self, descriptor: int) -> None:
        folder = jail.make_folder(self._scratch) if self._scratch is not None else None
        try:
            pid = os.fork()
        except OSError:
            jail.remove_folder(folder)
            raise
        if pid == 0:
            try:
                for inherited in (self._link.fileno(), *self._folders, *filter(None, [self._parent])):
                    os.close(inherited)
                run_warden(socket.socket(fileno=descriptor), self._plan, folder)
            finally:  # never return into the zygote's loop
                os._exit(1)
        warden = os.pidfd_open(pid)
        self._folders[warden] = folder
        self._poll.register(warden, select.POLLIN)


def _missing_layers(packages: Mapping[str, str], landlock_version: int) -> dict[Tier, dict[str, str]]:
    """Return the missing layers of each tier, the stronger one first, with the reasons."""
    common = {} if kernel.seccomp_available() else {"seccomp": "this kernel has none"}
    jail_fault = _jail_refusal(packages)
    old = f"this kernel has version {landlock_version}, not {kernel.SCOPED_VERSION}"
    return {
        "namespaces": common | ({"namespaces": jail_fault} if jail_fault else {}),
        "landlock": common | ({"landlock": old} if landlock_version < kernel.SCOPED_VERSION else {}),
    }


def _jail_refusal(packages: Mapping[str, str]) -> str:
    """Try the jail in a child process, because a failure leaves the process in an unknown state."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            jail.enter_jail(packages)
        except Exception as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as report:
        reason = report.read().decode()
    _, status = os.waitpid(pid, 0)
    return (reason or f"the attempt ended with status {status}") if status else ""


def _import_everything() -> None:
    """Import all libraries, including the parts that they load at first use, once for all processes."""
    for name in sorted(ALLOWED_IMPORTS):
        importlib.import_module(name)
    numpy, sympy = sys.modules["numpy"], sys.modules["sympy"]
    numpy.linalg.inv(numpy.random.default_rng(0).random((2, 2)))
    equation = sympy.sympify("x**2 - 2")
    sympy.simplify(sympy.integrate(equation * sympy.exp(equation.free_symbols.pop())))
    sympy.solve(equation)
    gc.collect()
    gc.freeze()
