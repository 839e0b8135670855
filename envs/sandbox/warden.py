"""The process outside a cell that times, bounds and ends the code inside, and reports to the host."""

import contextlib
import os
import select
import signal
import socket
import time
from typing import NoReturn

from envs import kernel
from envs.sandbox.cell import NONCE_BYTES, Cell, CellPlan, start_cell
from envs.sandbox.jail import MAX_FILES, TMP_DIR, TMP_MB, enter_cell
from envs.sandbox.protocol import (
    MAX_CPU_S,
    REQUEST_HEADER,
    BoundedOutput,
    CellEndedError,
    death_of,
    encode_frame,
    encode_reply,
    find_answer,
    parse_answer,
    receive,
)

_SETUP_TIMEOUT_S = 20.0
_CHECK_FILES_EVERY_S = 0.02
_CHUNK_BYTES = 1 << 16
_MAX_OUTPUT_CHARS = 16_384
_MAX_OUTPUT_MB = 8


def tmpfs_bytes(mount: int) -> int:
    """Return the memory that the files of a tmpfs occupy."""
    state = os.fstatvfs(mount)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def too_many_files(folder: int) -> bool:
    """Compare number and lengths, which are never less than the use of the disk, with the bounds of an episode."""
    with os.scandir(folder) as entries:
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in entries]
    return len(sizes) > MAX_FILES or sum(sizes) > TMP_MB << 20


def run_warden(link: socket.socket, plan: CellPlan, folder: str | None) -> NoReturn:
    """Serve one episode over `link`. A fault is reported as text, or by the end of the connection.

    `folder` is the folder of an episode without separate mounts: its files cannot be removed or renamed, so that all
    are counted. Otherwise a tmpfs bounds them.
    """
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            kernel.die_with_parent(signal.SIGKILL)
            if folder is None:
                enter_cell()
            place = folder or TMP_DIR
            files = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            cell = start_cell(plan, place, link)
            # From now on the warden reads data of hostile code, and needs only pipes, link and cell.
            kernel.drop_capabilities()
            kernel.forbid_new_privileges()
            if "landlock" in plan.layers:
                kernel.restrict_files({}, scoped=False)  # the cell is outside this scope: the warden must signal it
            if "seccomp" in plan.layers:
                chosen = {**kernel.CELL_CHOSEN, kernel.KILL: (0, frozenset({cell.pid}))}
                kernel.restrict_calls(kernel.filter_program(kernel.WARDEN_CALLS, chosen, {}))
        except OSError as error:
            link.send(f"the code process could not start: {error}".encode())
            os._exit(1)
        _Warden(link, cell, files, in_tmpfs=folder is None).serve()
    finally:
        os._exit(0)


class _Warden:
    def __init__(self, link: socket.socket, cell: Cell, files: int, *, in_tmpfs: bool) -> None:
        self._link = link
        self._cell = cell
        self._files = files
        self._in_tmpfs = in_tmpfs

    def serve(self) -> None:
        try:
            try:
                report = self._converse(b"", b"", _SETUP_TIMEOUT_S, BoundedOutput())
            except CellEndedError as ended:
                report = f"the code process ended before it was ready: {ended}".encode()
            self._link.send(report)
            alive = True
            while alive:
                request = receive(self._link)
                (timeout_s,) = REQUEST_HEADER.unpack_from(request)
                alive, reply = self._run(request[REQUEST_HEADER.size :], timeout_s)
                self._link.send(reply)
        except ConnectionError:  # the host closed the episode
            self._kill()

    def _run(self, source: bytes, timeout_s: float) -> tuple[bool, bytes]:
        """Run a source; the cell is stopped between runs, so that code that answers early cannot run on unbounded."""
        output, nonce, alive = BoundedOutput(), os.urandom(NONCE_BYTES), True
        os.kill(self._cell.pid, signal.SIGCONT)
        try:
            answer = self._converse(encode_frame(nonce + source), nonce, timeout_s, output)
            category, message = parse_answer(answer)
            os.kill(self._cell.pid, signal.SIGSTOP)
            while self._collect(output):
                pass
            self._check_files()
        except CellEndedError as ended:
            alive, category, message = False, ended.category, str(ended)
        text = output.text(_MAX_OUTPUT_CHARS)
        file_bytes = tmpfs_bytes(self._files) if alive and self._in_tmpfs else 0
        return alive, encode_reply(category, alive=alive, file_bytes=file_bytes, output=text, message=message)

    def _converse(self, request: bytes, nonce: bytes, timeout_s: float, output: BoundedOutput) -> bytes:
        """Send `request`, collect output, and return the answer to `nonce`."""
        cell, received, deadline = self._cell, b"", time.monotonic() + timeout_s
        poll = select.poll()
        for descriptor in (cell.pidfd, cell.results, cell.output, self._link.fileno()):
            poll.register(descriptor, select.POLLIN)
        if request:
            poll.register(cell.requests, select.POLLOUT)
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                self._kill()
                raise CellEndedError("timeout", f"Timed out after {timeout_s:g} s.")
            ready = dict(poll.poll((remaining_s if self._in_tmpfs else _CHECK_FILES_EVERY_S) * 1000 + 1))
            self._check_files()
            if self._link.fileno() in ready:
                raise ConnectionError("the host hung up")
            # A descriptor closed by the code must leave the poll, or this loop would spin until the deadline.
            if cell.output in ready and self._collect(output) == b"":
                poll.unregister(cell.output)
            if cell.requests in ready:
                # Full, or closed by the code, which will time out.
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    request = request[os.write(cell.requests, request) :]
                if not request or ready[cell.requests] & select.POLLERR:
                    poll.unregister(cell.requests)
            if cell.results in ready:
                chunk = _read(cell.results)
                if chunk == b"":
                    poll.unregister(cell.results)
                answer, received = find_answer(received + (chunk or b""), nonce)
                if answer is not None:
                    return answer
            if cell.pidfd in ready:
                while self._collect(output):
                    pass
                _, status, usage = os.wait4(cell.pid, 0)
                raise death_of(status, cpu_used_up=usage.ru_utime + usage.ru_stime >= MAX_CPU_S)

    def _check_files(self) -> None:
        if not self._in_tmpfs and too_many_files(self._files):
            self._kill()
            bound = f"{TMP_MB} MB or {MAX_FILES} files"
            raise CellEndedError("disk", f"Stopped: the files of this episode are more than {bound}.")

    def _collect(self, output: BoundedOutput) -> bytes | None:
        chunk = _read(self._cell.output)
        output.feed(chunk or b"")
        if output.total_bytes > _MAX_OUTPUT_MB << 20:
            self._kill()
            raise CellEndedError("output", f"Stopped: more than {_MAX_OUTPUT_MB} MB of output.")
        return chunk

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # already waited for
            os.kill(self._cell.pid, signal.SIGKILL)
            os.waitpid(self._cell.pid, 0)


def _read(descriptor: int) -> bytes | None:
    """Return None without data, and empty bytes at the end of the stream."""
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return None
