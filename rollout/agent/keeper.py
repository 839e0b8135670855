"""The processes between a worker and the program of an attempt: they bound the program, and leave nothing of it.

`main` is run by an interpreter without site-packages, as two processes, of which one outlives the other: Ray kills the
children of a worker, and no others. Both adopt orphans, so that a daemon does not escape.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from subprocess import PIPE, Popen
from typing import NoReturn

from envs import kernel

MAX_FILE_BYTES = 1 << 30
MAX_PROCESSES = 512
MAX_LINE_BYTES = 1 << 19
LOOK_EVERY_S = 0.25
REMOVE = ("sh", "-c", 'rm -rf -- "$0" || { chmod -R u+rwx -- "$0"; rm -rf -- "$0"; }')
"""Deletes the folder that is named after it, however deep, and also where rights were taken away."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CHUNK_BYTES = 1 << 16


def main() -> NoReturn:
    """Run a program in `folder`/work until it, the worker or SIGTERM ends it, report its end, and delete the folder."""
    _, _, worker, folder, max_memory_mb, *words = sys.argv
    first = os.getpid()
    try:
        kernel.adopt_orphans()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        worker_end = os.pidfd_open(int(worker))
        if os.getppid() != int(worker):
            raise ProcessLookupError("the worker has ended")
        if second := os.fork():
            signal.signal(signal.SIGTERM, lambda *_: os.kill(second, signal.SIGKILL))
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.waitpid(second, 0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            kernel.adopt_orphans()
            _keep(words, f"{folder}/work", int(max_memory_mb), (os.pidfd_open(first), worker_end))
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        end_all()
        os.execvp(REMOVE[0], (*REMOVE, folder))


def _keep(words: list[str], work: str, max_memory_mb: int, ends: tuple[int, ...]) -> None:
    """Run the program until it ends, goes beyond a limit, or one of `ends` is ready."""
    try:
        # This process has one thread, so that a function may run between fork and exec.
        program = Popen(words, cwd=work, start_new_session=True, preexec_fn=_bound, stdout=PIPE, stderr=PIPE)  # noqa: PLW1509
    except OSError as error:
        _report(127, "", "", f"cannot be started: {error}")
        return
    kept = {one.fileno(): bytearray() for one in (program.stdout, program.stderr) if one}
    ends = (*ends, os.pidfd_open(program.pid))
    poll = select.poll()
    for descriptor in (*kept, *ends):
        poll.register(descriptor, select.POLLIN)
    over, due, ready = "", 0.0, set[int]()
    while not over and not ready & set(ends):
        ready = {descriptor for descriptor, _ in poll.poll(LOOK_EVERY_S * 1000)}
        for reader in ready & kept.keys():
            if chunk := os.read(reader, _CHUNK_BYTES):
                _add(kept[reader], chunk)
            else:
                poll.unregister(reader)
        if time.monotonic() >= due:
            over, due = _excess(max_memory_mb), time.monotonic() + LOOK_EVERY_S
    status = os.waitstatus_to_exitcode(end_all()[program.pid])
    for reader in kept:
        os.set_blocking(reader, False)
        with suppress(BlockingIOError):
            while chunk := os.read(reader, _CHUNK_BYTES):
                _add(kept[reader], chunk)
    out, err = map(_last_line, kept.values())
    if out is None:
        over = over or f"printed a last line of more than {MAX_LINE_BYTES} bytes"
    _report(status, over, out or "", err or "")


def _report(status: int, over: str, out: str, err: str) -> None:
    # The worker may have ended.
    with suppress(BrokenPipeError):
        print(json.dumps({"status": status, "over": over, "out": out, "err": err}), flush=True)


def _bound() -> None:
    """Bound this process, which then becomes the program."""
    kernel.die_with_parent(signal.SIGKILL)
    for name, bound in ((resource.RLIMIT_FSIZE, MAX_FILE_BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError):  # the bound of this machine is lower
            resource.setrlimit(name, (bound, bound))
    kernel.forbid_new_privileges()
    if kernel.landlock_version() >= kernel.SCOPED_VERSION:
        kernel.restrict_processes()


def end_all() -> dict[int, int]:
    """Kill all descendants, which become children in turn, and return the wait statuses of the children."""
    statuses: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            for child in _children(os.getpid()):
                for kill in (os.killpg, os.kill):
                    with suppress(OSError):
                        kill(child, signal.SIGKILL)
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended:
                statuses[ended] = status
            else:
                time.sleep(0.002)
    return statuses


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def _excess(max_memory_mb: int) -> str:
    """Return the limit that the descendants are beyond; empty within all of them."""
    num_processes, num_pages, waiting = 0, 0, _children(os.getpid())
    while waiting:
        process = waiting.pop()
        num_processes += 1
        if num_processes > MAX_PROCESSES:
            return f"ran more than {MAX_PROCESSES} processes"
        with suppress(OSError, IndexError), open(f"/proc/{process}/statm", encoding="ascii") as file:
            num_pages += int(file.read().split()[1])
        waiting += _children(process)
    if num_pages * _PAGE_BYTES > max_memory_mb << 20:
        return f"took more memory than agent.max_memory_mb = {max_memory_mb}"
    return ""


def _add(kept: bytearray, chunk: bytes) -> None:
    """Append a part of the output, and keep the end, which is longer than a line may be."""
    kept += chunk
    del kept[: -MAX_LINE_BYTES - 2]


def _last_line(text: bytearray) -> str | None:
    """Return the last line that is not blank; None for one that is longer than MAX_LINE_BYTES."""
    # Texts have more line separators than bytes. A progress bar ends its lines by a carriage return.
    lines = text.splitlines()
    line = next((one for one in reversed(lines) if one.decode(errors="replace").strip()), bytearray())
    may_be_cut = len(text) > MAX_LINE_BYTES and line is lines[0]
    return None if may_be_cut or len(line) > MAX_LINE_BYTES else line.decode(errors="replace").strip()
