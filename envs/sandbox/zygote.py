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
from collections.abc import Mapping
from typing import Any, NoReturn

from envs.sandbox import jail, kernel
from envs.sandbox.cell import CellPlan
from envs.sandbox.frames import READY, receive_frame, send_frame
from envs.sandbox.landlock import landlock_version
from envs.sandbox.seccomp import seccomp_available
from envs.sandbox.settings import ALLOWED_IMPORTS, LAYERS, SandboxSettings, decode_settings
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
    host = os.pidfd_open(os.getppid())
    link = socket.socket(fileno=_LINK)
    order = json.loads(receive_frame(link))
    settings = decode_settings(order["settings"])
    _be_first_to_die()
    _load_foreign_libraries()
    missing = _missing_layers(settings, order["packages"])
    if "namespaces" not in missing:
        jail.enter_jail(order["packages"])
    zygote = os.fork()
    if zygote:
        link.close()
        _watch(host, zygote)
    os.close(host)
    kernel.die_with_parent(signal.SIGKILL)
    _be_zygote(link, settings, missing, order["packages"])


def _watch(host: int, zygote: int) -> NoReturn:
    """Watches the host by descriptor: a parent-death signal would follow the thread that started this."""
    poll = select.poll()
    poll.register(host, select.POLLIN)
    poll.register(os.pidfd_open(zygote), select.POLLIN)
    poll.poll()
    os._exit(0)


def _be_zygote(
    link: socket.socket, settings: SandboxSettings, missing: Mapping[str, str], packages: Mapping[str, str]
) -> NoReturn:
    try:
        send_frame(link, json.dumps({"missing": missing}).encode())
        layers = frozenset(LAYERS) - set(missing)
        directories = _arrange_imports(jailed="namespaces" in layers, packages=packages)
        _import_everything()
        send_frame(link, READY)
        plan = CellPlan(settings=settings, layers=layers, readable=tuple(directories), writable=(jail.TMP_DIR,))
        _fork_on_demand(link, plan)
    except Exception:
        with contextlib.suppress(OSError):
            send_frame(link, traceback.format_exc().encode())
    finally:
        os._exit(0)


def _fork_on_demand(link: socket.socket, plan: CellPlan) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        if not message:
            return
        with contextlib.suppress(OSError):  # no process: the host sees its connection end
            _fork_warden(link, descriptors[0], plan)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_warden(link: socket.socket, descriptor: int, plan: CellPlan) -> None:
    if os.fork() == 0:
        try:
            link.close()
            run_warden(socket.socket(fileno=descriptor), plan)
        finally:  # never back into the zygote's loop
            os._exit(1)


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


def _missing_layers(settings: SandboxSettings, packages: Mapping[str, str]) -> dict[str, str]:
    """Layer -> why it is not there."""
    missing = dict.fromkeys(settings.disabled_layers, "disabled")
    if "namespaces" not in missing and (reason := _jail_refusal(packages)):
        missing["namespaces"] = reason
    if "landlock" not in missing and not landlock_version():
        missing["landlock"] = "this kernel has none"
    if "seccomp" not in missing and not seccomp_available():
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


def _arrange_imports(*, jailed: bool, packages: Mapping[str, str]) -> list[str]:
    standard = jail.python_directories()
    site = [jail.PACKAGES_DIR] if jailed else sorted({os.path.dirname(path) for path in packages.values()})
    sys.path[:] = standard + site
    sys.path_importer_cache.clear()
    return standard + site


def _import_everything() -> None:
    """Libraries that load a part of themselves at first use do it here, once for all processes."""
    modules: dict[str, Any] = {name: importlib.import_module(name) for name in sorted(ALLOWED_IMPORTS)}
    numpy, sympy = modules["numpy"], modules["sympy"]
    numpy.linalg.inv(numpy.random.default_rng(0).random((2, 2)))
    equation = sympy.sympify("x**2 - 2")
    sympy.simplify(sympy.integrate(equation * sympy.exp(equation.free_symbols.pop())))
    sympy.solve(equation)
    gc.collect()
    gc.freeze()
