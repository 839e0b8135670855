"""The clean process that every code process is forked from: it is jailed, holds no secret, and only forks."""

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
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import NoReturn

from envs.sandbox import jail, kernel
from envs.sandbox.cell import CellPlan
from envs.sandbox.frames import READY, receive_frame, send_frame
from envs.sandbox.scratch import make_folder, make_scratch, remove_folder
from envs.sandbox.settings import (
    ALLOWED_IMPORTS,
    LAYERS,
    REQUIRED_LAYERS,
    SandboxSettings,
    Tier,
    choose_tier,
    lacking,
)
from envs.sandbox.walls import landlock_version, seccomp_available
from envs.sandbox.warden import run_warden

_LINK = 0
_OOM_SCORE = b"500"
# Libraries outside the jail that compiled modules ask for by name; once loaded, no file is looked up.
_FOREIGN_LIBRARIES = (
    *("libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1"),
    *("libgcc_s.so.1", "libstdc++.so.6"),
)
_FOREIGN_MODULES = ("zlib", "bz2", "lzma", "hashlib", "_strptime")


def main() -> NoReturn:
    """Process 0 only watches; process 1 of the jail is the zygote, and all in the jail die with it."""
    _forget_where_this_is()
    # A host that ignores it hands that on, and then no child could be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    host = os.pidfd_open(os.getppid())
    link = socket.socket(fileno=_LINK)
    order = json.loads(receive_frame(link))
    settings = SandboxSettings(**order["settings"])
    _be_first_to_die()
    _load_foreign_libraries()
    missing = _missing_layers(order["packages"])
    lacks = lacking(missing, landlock_version=landlock_version())
    tier = choose_tier(settings.tier, lacks)
    if tier is None:
        send_frame(link, json.dumps({"tier": None, "lacks": lacks}).encode())
        os._exit(1)
    scratch = make_scratch(order["scratch_parent"]) if tier == "landlock" else None
    there = (REQUIRED_LAYERS[tier] | {"landlock"}) - {*settings.disabled_layers, *missing}
    layers = [layer for layer in LAYERS if layer in there]
    send_frame(link, json.dumps({"tier": tier, "lacks": lacks, "layers": layers, "scratch": scratch}).encode())
    if tier == "namespaces":
        jail.enter_jail(order["packages"])
    zygote = os.fork()
    if zygote:
        link.close()
        _watch(host, zygote, scratch)
    os.close(host)
    if scratch is None:
        kernel.die_with_parent(signal.SIGKILL)
    _be_zygote(link, settings, tier, frozenset(layers), order["packages"], scratch)


def _forget_where_this_is() -> None:
    """The code could read these: they name folders of the host, and the user in them."""
    os.chdir("/")
    sys.executable = sys._base_executable = ""  # type: ignore[attr-defined]
    sys.argv[:] = sys.orig_argv[:] = []


def _watch(host: int, zygote: int, scratch: str | None) -> NoReturn:
    """Watches the host by descriptor: a parent-death signal would follow the thread that started this."""
    poll = select.poll()
    poll.register(host, select.POLLIN)
    poll.register(os.pidfd_open(zygote), select.POLLIN)
    poll.poll()
    if scratch is not None:
        os.kill(zygote, signal.SIGKILL)
        os.waitpid(zygote, 0)
        remove_folder(scratch)
    os._exit(0)


def _be_zygote(
    link: socket.socket,
    settings: SandboxSettings,
    tier: Tier,
    layers: frozenset[str],
    packages: Mapping[str, str],
    scratch: str | None,
) -> NoReturn:
    """`scratch` is the folder of the episodes' folders where they have no mounts of their own."""
    try:
        directories = _arrange_imports(tier, packages)
        _import_everything()
        send_frame(link, READY)
        readable = directories if tier == "namespaces" else [*_standard_files(), *packages.values()]
        plan = CellPlan(settings=settings, tier=tier, layers=layers, readable=tuple(readable))
        wardens = _Wardens(link, plan, scratch)
        if scratch is not None:
            wardens.watch_parent()
        wardens.fork_on_demand()
        wardens.kill()
    except Exception:
        with contextlib.suppress(OSError):
            send_frame(link, traceback.format_exc().encode())
    finally:
        _remove(scratch)
        os._exit(0)


class _Wardens:
    """The wardens that live, by descriptor, each with its episode's folder, which goes when the warden is gone."""

    def __init__(self, link: socket.socket, plan: CellPlan, scratch: str | None) -> None:
        self._link = link
        self._plan = plan
        self._scratch = scratch
        self._folders: dict[int, str | None] = {}
        self._parent: int | None = None
        self._poll = select.poll()

    def watch_parent(self) -> None:
        """End in order when the watcher is gone, and not with it: whoever is left of the two removes the files. Both
        can go at once with the host, whose cluster ends the children of a process with it."""
        self._parent = os.pidfd_open(os.getppid())
        self._poll.register(self._parent, select.POLLIN)

    def kill(self) -> None:
        for warden in self._folders:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(warden, signal.SIGKILL)

    def fork_on_demand(self) -> None:
        """Returns when the host hangs up, or the parent that is watched is gone."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps, orphaned cells too
        self._poll.register(self._link, select.POLLIN)
        while True:
            for ready, _ in self._poll.poll():
                if ready in self._folders:
                    self._bury(ready)
                elif ready == self._parent or not self._serve():
                    return

    def _serve(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._link, 1, 1)
        with contextlib.suppress(OSError):  # no process: the host sees its connection end
            for descriptor in descriptors:
                self._fork(descriptor)
        for descriptor in descriptors:
            os.close(descriptor)
        return bool(message)

    def _fork(self, descriptor: int) -> None:
        folder = make_folder(self._scratch) if self._scratch is not None else None
        try:
            warden = self._forked(descriptor, folder)
        except OSError:
            _remove(folder)
            raise
        self._folders[warden] = folder
        self._poll.register(warden, select.POLLIN)

    def _forked(self, descriptor: int, folder: str | None) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                for inherited in (self._link.fileno(), *self._folders, *filter(None, [self._parent])):
                    os.close(inherited)
                run_warden(socket.socket(fileno=descriptor), self._plan, folder)
            finally:  # never back into the zygote's loop
                os._exit(1)
        try:
            return os.pidfd_open(pid)
        except OSError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            raise

    def _bury(self, warden: int) -> None:
        self._poll.unregister(warden)
        os.close(warden)
        _remove(self._folders.pop(warden))


def _remove(folder: str | None) -> None:
    if folder is not None:
        remove_folder(folder)


def _be_first_to_die() -> None:
    with contextlib.suppress(OSError):  # without /proc the kernel chooses by size alone
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, _OOM_SCORE)
        os.close(score)


def _load_foreign_libraries() -> None:
    for name in _FOREIGN_LIBRARIES:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
    for name in _FOREIGN_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _missing_layers(packages: Mapping[str, str]) -> dict[str, str]:
    """Layer -> why it is not there."""
    missing = {}
    if reason := _jail_refusal(packages):
        missing["namespaces"] = reason
    if not landlock_version():
        missing["landlock"] = "this kernel has none"
    if not seccomp_available():
        missing["seccomp"] = "this kernel has none"
    return missing


def _jail_refusal(packages: Mapping[str, str]) -> str:
    """Tried in a child, because a jail that fails half way leaves a process in no known state."""
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


def _arrange_imports(tier: Tier, packages: Mapping[str, str]) -> list[str]:
    around = {os.path.dirname(path) for path in packages.values()}
    sys.path[:] = [*jail.python_directories(), *([jail.PACKAGES_DIR] if tier == "namespaces" else sorted(around))]
    sys.path_importer_cache.clear()
    return list(sys.path)


def _standard_files() -> Iterator[str]:
    """The standard library entry by entry, without the installed packages below it: a rule for the whole folder would
    hold for these, too."""
    for folder in jail.python_directories():
        with os.scandir(folder) as entries:
            yield from (entry.path for entry in entries if entry.name not in jail.INSTALLED)


def _import_everything() -> None:
    """Libraries that load a part of themselves at first use do it here, once for all processes."""
    modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in sorted(ALLOWED_IMPORTS)}
    numpy, sympy = modules["numpy"], modules["sympy"]
    numpy.linalg.inv(numpy.random.default_rng(0).random((2, 2)))
    equation = sympy.sympify("x**2 - 2")
    sympy.simplify(sympy.integrate(equation * sympy.exp(equation.free_symbols.pop())))
    sympy.solve(equation)
    gc.collect()
    gc.freeze()
