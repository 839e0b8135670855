"""The process outside a cell that times, bounds and ends the code inside, and reports to the host."""

import contextlib
import math
import os
import select
import signal
import socket
import time
from typing import NoReturn

from envs import kernel
from envs.sandbox.cell import NONCE_BYTES, Cell, CellPlan, start_cell
from envs.sandbox.jail import TMP_DIR, enter_cell
from envs.sandbox.protocol import (
    REQUEST_HEADER,
    BoundedOutput,
    CellEndedError,
    SandboxSettings,
    death_of,
    encode_frame,
    encode_reply,
    find_answer,
    parse_answer,
    receive_frame,
    send_frame,
)

_SETUP_TIMEOUT_S = 20.0
_CHUNK_BYTES = 1 << 16
_MIB = 1 << 20
_ENTRY_BYTES = 4096


class EpisodeFiles:
    """Files of an episode: in a tmpfs of its own, which bounds and holds them, or in a flat folder on disk.

    Those in the folder cannot be removed or renamed, so all are counted.
    """

    def __init__(self, path: str, *, in_tmpfs: bool, max_mb: int, max_files: int) -> None:
        self.check_every_s = math.inf if in_tmpfs else 0.02
        self._in_tmpfs = in_tmpfs
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._max_bytes, self._max_files = max_mb * _MIB, max_files

    def memory_bytes(self) -> int:
        if not self._in_tmpfs:
            return 0
        state = os.fstatvfs(self._descriptor)
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    def over_bound(self) -> bool:
        """Compare their lengths, which are never less than their use of the disk, with the bounds."""
        if self._in_tmpfs:
            return False
        with os.scandir(self._descriptor) as entries:
            sizes = [_ENTRY_BYTES + entry.stat(follow_symlinks=False).st_size for entry in entries]
        return len(sizes) > self._max_files or sum(sizes) > self._max_bytes + _ENTRY_BYTES * len(sizes)


def run_warden(link: socket.socket, plan: CellPlan, folder: str | None) -> NoReturn:
    """Serve one episode over `link`. A fault is reported as text, or by the end of the connection.

    `folder` is the folder of an episode without separate mounts.
    """
    settings = plan.settings
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            kernel.die_with_parent(signal.SIGKILL)
            if folder is None:
                enter_cell(settings.tmp_mb, settings.max_files)
            place = folder or TMP_DIR
            files = EpisodeFiles(place, in_tmpfs=folder is None, max_mb=settings.tmp_mb, max_files=settings.max_files)
            cell = start_cell(plan, place, link)
            # From now on the warden reads data of hostile code, and needs only pipes, link and cell.
            kernel.drop_capabilities()
            kernel.forbid_new_privileges()
            if "landlock" in plan.layers:
                kernel.restrict_files((), scoped=False)  # the cell is outside this scope: the warden must signal it
            if "seccomp" in plan.layers:
                kernel.restrict_calls(kernel.filter_program(kernel.WARDEN_CALLS, kernel.warden_chosen(cell.pid)))
        except OSError as error:
            send_frame(link, f"the code process could not start: {error}".encode())
            os._exit(1)
        _Warden(link, cell, files, settings).serve()
    finally:
        os._exit(0)


class _Warden:
    def __init__(self, link: socket.socket, cell: Cell, files: EpisodeFiles, settings: SandboxSettings) -> None:
        self._link = link
        self._cell = cell
        self._files = files
        self._files_due = 0.0
        self._settings = settings

    def serve(self) -> None:
        try:
            try:
                report = self._converse(b"", b"", _SETUP_TIMEOUT_S, BoundedOutput())
            except CellEndedError as ended:
                report = f"the code process ended before it was ready: {ended}".encode()
            send_frame(self._link, report)
            alive = True
            while alive:
                request = receive_frame(self._link)
                (timeout_s,) = REQUEST_HEADER.unpack_from(request)
                alive, reply = self._run(request[REQUEST_HEADER.size :], timeout_s)
                send_frame(self._link, reply)
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
        text = output.text(self._settings.max_output_chars)
        file_bytes = self._files.memory_bytes() if alive else 0
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
            ready = dict(poll.poll(min(remaining_s, self._files.check_every_s) * 1000 + 1))
            if time.monotonic() >= self._files_due:
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
                raise death_of(status, cpu_used_up=usage.ru_utime + usage.ru_stime >= self._settings.max_cpu_s)

    def _check_files(self) -> None:
        self._files_due = time.monotonic() + self._files.check_every_s
        if self._files.over_bound():
            self._kill()
            bound = f"{self._settings.tmp_mb} MB or {self._settings.max_files} files"
            raise CellEndedError("disk", f"Stopped: the files of this episode are more than {bound}.")

    def _collect(self, output: BoundedOutput) -> bytes | None:
        chunk = _read(self._cell.output)
        output.feed(chunk or b"")
        if output.total_bytes > self._settings.max_output_mb << 20:
            self._kill()
            raise CellEndedError("output", f"Stopped: more than {self._settings.max_output_mb} MB of output.")
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
