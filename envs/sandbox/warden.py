"""The process outside a cell that times, bounds and ends the code inside, and reports to the host."""

import os
import select
import signal
import socket
import struct
import time
from typing import NoReturn

from envs.sandbox.cell import NONCE_BYTES, Cell, CellPlan, start_cell
from envs.sandbox.frames import FrameError, encode_frame, receive_frame, send_frame, split_frame
from envs.sandbox.jail import enter_cell
from envs.sandbox.output import BoundedOutput, cut_middle, printable_text
from envs.sandbox.settings import SandboxSettings

REQUEST_HEADER = struct.Struct("!d")
CODE_CATEGORIES = frozenset({"", "syntax", "forbidden-import", "exception", "memory"})
"""What a code process may say of itself. Time, output and crashes are for the warden to judge."""
WARDEN_CATEGORIES = frozenset({"timeout", "output", "crashed"})
_SETUP_TIMEOUT_S = 20.0
_MAX_ANSWER_BYTES = 1 << 16
_MAX_MESSAGE_CHARS = 4000
_CHUNK_BYTES = 1 << 16


class CellEndedError(Exception):
    """The code process is dead, by its own hand or the warden's."""

    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category


def run_warden(link: socket.socket, plan: CellPlan) -> NoReturn:
    """Serves one episode over `link`. The host is told of a fault by text, or by the end of the connection."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            if "namespaces" in plan.layers:
                enter_cell(plan.settings.tmp_mb, plan.settings.max_files)
            cell = start_cell(plan)
        except OSError as error:
            send_frame(link, f"the code process could not start: {error}".encode())
            os._exit(1)
        _Warden(link, cell, plan.settings).serve()
    finally:
        os._exit(0)


class _Warden:
    def __init__(self, link: socket.socket, cell: Cell, settings: SandboxSettings) -> None:
        self._link = link
        self._cell = cell
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
        except (FrameError, ConnectionError):  # the host is done with this episode
            self._kill()

    def _setup_report(self) -> bytes:
        try:
            return self._converse(b"", b"", time.monotonic() + _SETUP_TIMEOUT_S, BoundedOutput())
        except CellEndedError as ended:
            return f"the code process ended before it was ready: {ended}".encode()

    def _run(self, source: bytes, timeout_s: float) -> tuple[bool, bytes]:
        """Stopped between runs, so that code which answers early cannot go on outside any deadline."""
        output = BoundedOutput()
        nonce = os.urandom(NONCE_BYTES)
        alive = True
        os.kill(self._cell.pid, signal.SIGCONT)
        try:
            answer = self._converse(nonce + source, nonce, time.monotonic() + timeout_s, output)
            category, message = _parsed_answer(answer)
            os.kill(self._cell.pid, signal.SIGSTOP)
            self._drain(output)
        except CellEndedError as ended:
            alive, category, message = False, ended.category, str(ended)
            if category == "timeout":
                message = f"Timed out after {timeout_s:g} s."
        text = _joined(output.text(self._settings.max_output_chars), message)
        return alive, f"{category}|{int(alive)}\n{text}".encode(errors="replace")

    def _converse(self, request: bytes, nonce: bytes, deadline: float, output: BoundedOutput) -> bytes:
        """Sends `request`, collects output, returns what follows `nonce` in the answer.

        Answers without the nonce were written by an earlier run, and are dropped.
        """
        cell, pending, received = self._cell, encode_frame(request) if request else b"", b""
        poll = select.poll()
        for descriptor in (cell.pidfd, cell.results, cell.output, self._link.fileno()):
            poll.register(descriptor, select.POLLIN)
        if pending:
            poll.register(cell.requests, select.POLLOUT)
        while True:
            ready = dict(poll.poll(self._patience_ms(deadline)))
            if self._link.fileno() in ready:
                raise FrameError("the host hung up")
            if cell.output in ready:
                self._collect(output)
            if cell.requests in ready and pending:
                pending = pending[self._write(pending) :]
                if not pending:
                    poll.unregister(cell.requests)
            if cell.results in ready:
                received += self._read(cell.results)
                answer, received = _matching_answer(received, nonce)
                if answer is not None:
                    return answer
            if cell.pidfd in ready:
                self._drain(output)
                self._raise_death()

    def _patience_ms(self, deadline: float) -> float:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            self._kill()
            raise CellEndedError("timeout", "Timed out.")
        return remaining_s * 1000 + 1

    def _collect(self, output: BoundedOutput) -> bool:
        chunk = self._read(self._cell.output)
        output.feed(chunk)
        if output.total_bytes > self._settings.max_output_mb << 20:
            self._kill()
            raise CellEndedError("output", f"Stopped: more than {self._settings.max_output_mb} MB of output.")
        return bool(chunk)

    def _drain(self, output: BoundedOutput) -> None:
        while self._collect(output):
            pass

    def _read(self, descriptor: int) -> bytes:
        try:
            return os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return b""

    def _write(self, pending: bytes) -> int:
        try:
            return os.write(self._cell.requests, pending)
        except (BlockingIOError, BrokenPipeError):  # full, or the process is dying: its pidfd says so
            return 0

    def _kill(self) -> None:
        try:
            os.kill(self._cell.pid, signal.SIGKILL)
            os.waitpid(self._cell.pid, 0)
        except (ProcessLookupError, ChildProcessError):  # reaped before
            return

    def _raise_death(self) -> NoReturn:
        _, status, usage = os.wait4(self._cell.pid, 0)
        raise _ended(status, usage.ru_utime + usage.ru_stime >= self._settings.max_cpu_s)


def _ended(status: int, cpu_used_up: bool) -> CellEndedError:
    if os.WIFEXITED(status):
        return CellEndedError("crashed", f"The process ended itself with exit code {os.WEXITSTATUS(status)}.")
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and cpu_used_up:
        return CellEndedError("timeout", "All CPU time of this episode is used up.")
    if number == signal.SIGKILL:
        return CellEndedError("memory", "The system ended the process for its use of memory.")
    return CellEndedError("crashed", f"The process crashed ({signal.Signals(number).name}).")


def _matching_answer(received: bytes, nonce: bytes) -> tuple[bytes | None, bytes]:
    if len(received) > _MAX_ANSWER_BYTES:
        return b"exception\nThe answer of the process is too long.", b""
    try:
        while (split := split_frame(received)) is not None:
            frame, received = split
            if frame.startswith(nonce):
                return frame[len(nonce) :], received
    except FrameError:
        return b"exception\nThe answer of the process makes no sense.", b""
    return None, received


def _parsed_answer(answer: bytes) -> tuple[str, str]:
    category, _, message = printable_text(answer).partition("\n")
    if category not in CODE_CATEGORIES:
        return "exception", "The answer of the process makes no sense."
    return category, cut_middle(message, _MAX_MESSAGE_CHARS)


def _joined(output: str, message: str) -> str:
    if not message:
        return output
    return f"{output}\n{message}" if output and not output.endswith("\n") else output + message
