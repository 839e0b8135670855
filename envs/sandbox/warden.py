"""The process outside a cell that times, bounds and ends the code inside, and reports to the host."""

import os
import select
import signal
import socket
import time
from typing import NoReturn

from envs.sandbox import kernel
from envs.sandbox.cell import NONCE_BYTES, Cell, CellPlan, start_cell
from envs.sandbox.frames import FrameError, encode_frame, receive_frame, send_frame
from envs.sandbox.jail import TMP_DIR, enter_cell
from envs.sandbox.outcome import (
    REQUEST_HEADER,
    BoundedOutput,
    CellEndedError,
    Verdict,
    death_of,
    encode_reply,
    find_answer,
    parse_answer,
)
from envs.sandbox.scratch import FolderFiles, TmpfsFiles
from envs.sandbox.settings import SandboxSettings
from envs.sandbox.walls import WARDEN_CALLS, filter_program, restrict_calls, restrict_files, warden_chosen

_SETUP_TIMEOUT_S = 20.0
_CHUNK_BYTES = 1 << 16

Files = FolderFiles | TmpfsFiles


def run_warden(link: socket.socket, plan: CellPlan, folder: str | None) -> NoReturn:
    """Serves one episode over `link`. The host hears of a fault by text, or by the end of the connection.

    `folder` is the episode's own where it has no mounts of its own.
    """
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            kernel.die_with_parent(signal.SIGKILL)
            files = _open_files(plan.settings, folder)
            cell = start_cell(plan, folder or TMP_DIR, link)
            _drop_rights(plan, cell)
        except OSError as error:
            send_frame(link, f"the code process could not start: {error}".encode())
            os._exit(1)
        _Warden(link, cell, files, plan.settings).serve()
    finally:
        os._exit(0)


def _open_files(settings: SandboxSettings, folder: str | None) -> Files:
    if folder is not None:
        return FolderFiles(folder, max_mb=settings.tmp_mb, max_files=settings.max_files)
    enter_cell(settings.tmp_mb, settings.max_files)
    return TmpfsFiles(TMP_DIR)


def _drop_rights(plan: CellPlan, cell: Cell) -> None:
    """From here on it reads what hostile code wrote, and needs only its pipes, its link and its cell."""
    kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    if "landlock" in plan.layers:
        restrict_files((), scoped=False)  # the cell, which is in no scope of its warden, must be signalled
    if "seccomp" in plan.layers:
        restrict_calls(filter_program(WARDEN_CALLS, warden_chosen(cell.pid)))


class _Warden:
    def __init__(self, link: socket.socket, cell: Cell, files: Files, settings: SandboxSettings) -> None:
        self._link = link
        self._cell = cell
        self._files = files
        self._files_due = 0.0
        self._settings = settings

    def serve(self) -> None:
        try:
            send_frame(self._link, self._setup_report())
            alive = True
            while alive:
                request = receive_frame(self._link)
                (timeout_s,) = REQUEST_HEADER.unpack_from(request)
                alive, reply = self._run(request[REQUEST_HEADER.size :], timeout_s)
                send_frame(self._link, reply)
        except ConnectionError:  # the host is done with this episode
            self._kill()

    def _setup_report(self) -> bytes:
        try:
            return self._converse(b"", b"", _SETUP_TIMEOUT_S, BoundedOutput())
        except CellEndedError as ended:
            return f"the code process ended before it was ready: {ended}".encode()

    def _run(self, source: bytes, timeout_s: float) -> tuple[bool, bytes]:
        """Stopped between runs, so that code which answers early cannot go on outside any deadline."""
        output, nonce, alive = BoundedOutput(), os.urandom(NONCE_BYTES), True
        os.kill(self._cell.pid, signal.SIGCONT)
        try:
            answer = self._converse(encode_frame(nonce + source), nonce, timeout_s, output)
            category, message = parse_answer(answer)
            os.kill(self._cell.pid, signal.SIGSTOP)
            self._drain(output)
            self._check_files()
        except CellEndedError as ended:
            alive, category, message = False, ended.category, str(ended)
        text = output.text(self._settings.max_output_chars)
        held = self._files.memory_bytes() if alive else 0
        return alive, encode_reply(Verdict(category, alive, held), output=text, message=message)

    def _converse(self, request: bytes, nonce: bytes, timeout_s: float, output: BoundedOutput) -> bytes:
        """Sends `request`, collects output, and returns the answer to `nonce`."""
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
                raise FrameError("the host hung up")
            # What the code closed must leave the poll, or this loop would spin until the deadline.
            if cell.output in ready and self._collect(output) == b"":
                poll.unregister(cell.output)
            if cell.requests in ready:
                request = request[_write(cell.requests, request) :]
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
                self._bury(output)

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

    def _drain(self, output: BoundedOutput) -> None:
        while self._collect(output):
            pass

    def _bury(self, output: BoundedOutput) -> NoReturn:
        self._drain(output)
        _, status, usage = os.wait4(self._cell.pid, 0)
        raise death_of(status, cpu_used_up=usage.ru_utime + usage.ru_stime >= self._settings.max_cpu_s)

    def _kill(self) -> None:
        try:
            os.kill(self._cell.pid, signal.SIGKILL)
            os.waitpid(self._cell.pid, 0)
        except (ProcessLookupError, ChildProcessError):  # buried before
            return


def _read(descriptor: int) -> bytes | None:
    """None when there is nothing yet, empty when nothing can come any more."""
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return None


def _write(descriptor: int, pending: bytes) -> int:
    try:
        return os.write(descriptor, pending)
    except (BlockingIOError, BrokenPipeError):  # full; or the code closed its end, and will time out
        return 0
