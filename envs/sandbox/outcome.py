"""How a run of code ended, and what it printed: bounded in memory, safe for logs and prompts."""

import codecs
import os
import signal
import struct
from dataclasses import dataclass

from envs.sandbox.frames import FrameError, split_frame

_HALF_CAPACITY = 1 << 16
# Looked up once: its module is a file, and a warden opens none.
_ESCAPED = codecs.getencoder("unicode_escape")


class BoundedOutput:
    """Keeps the first and the last 64 KiB, and counts the rest."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def feed(self, chunk: bytes) -> None:
        self.total_bytes += len(chunk)
        room = _HALF_CAPACITY - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 2 * _HALF_CAPACITY:
            del self._tail[:-_HALF_CAPACITY]

    def text(self, max_chars: int) -> str:
        tail = bytes(self._tail[-_HALF_CAPACITY:])
        num_dropped = self.total_bytes - len(self._head) - len(tail)
        if not num_dropped:
            return cut_middle(printable_text(bytes(self._head) + tail), max_chars)
        head_text, tail_text = printable_text(bytes(self._head)), printable_text(tail)
        half = max_chars // 2
        num_left_out = num_dropped + len(head_text[half:]) + len(tail_text[:-half])
        return _joined(head_text[:half], num_left_out, tail_text[-half:])


def printable_text(data: bytes) -> str:
    """Control, format and surrogate characters become visible escapes: a terminal would obey them."""
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else _ESCAPED(letter)[0].decode() for letter in text
    )


def cut_middle(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return _joined(text[:half], len(text) - 2 * half, text[-half:])


def _joined(head: str, num_left_out: int, tail: str) -> str:
    return f"{head}\n... [{num_left_out} characters left out] ...\n{tail}"


REQUEST_HEADER = struct.Struct("!d")
"""Seconds of wall clock; the source follows."""
CODE_CATEGORIES = frozenset({"", "syntax", "forbidden-import", "exception", "memory"})
"""What a code process may say of itself. Time, output and crashes are for the warden to judge."""
WARDEN_CATEGORIES = frozenset({"timeout", "output", "crashed", "disk"})
_MAX_ANSWER_BYTES = 1 << 16
_MAX_MESSAGE_CHARS = 4000
_NONSENSE = b"exception\nThe answer of the process makes no sense."


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run ended: the error category ("" is none), whether the process lives on, and the bytes of memory that its
    files hold besides its own."""

    category: str
    alive: bool
    file_bytes: int


class CellEndedError(Exception):
    """The code process is dead, by its own hand or the warden's."""

    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category


def death_of(status: int, *, cpu_used_up: bool) -> CellEndedError:
    if os.WIFEXITED(status):
        return CellEndedError("crashed", f"The process ended itself with exit code {os.WEXITSTATUS(status)}.")
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and cpu_used_up:
        return CellEndedError("timeout", "All CPU time of this episode is used up.")
    if number == signal.SIGKILL:
        return CellEndedError("memory", "The system ended the process for its use of memory.")
    return CellEndedError("crashed", f"The process crashed ({signal.Signals(number).name}).")


def find_answer(received: bytes, nonce: bytes) -> tuple[bytes | None, bytes]:
    """The answer that starts with `nonce`, and what follows. Others were written by an earlier run."""
    if len(received) > _MAX_ANSWER_BYTES:
        return _NONSENSE, b""
    try:
        while (split := split_frame(received)) is not None:
            frame, received = split
            if frame.startswith(nonce):
                return frame[len(nonce) :], received
    except FrameError:
        return _NONSENSE, b""
    return None, received


def parse_answer(answer: bytes) -> tuple[str, str]:
    """Category and message. The code can write any answer it likes, but only about itself."""
    category, _, message = printable_text(answer).partition("\n")
    if category not in CODE_CATEGORIES:
        return parse_answer(_NONSENSE)
    return category, cut_middle(message, _MAX_MESSAGE_CHARS)


def encode_reply(verdict: Verdict, *, output: str, message: str) -> bytes:
    gap = "\n" if output and message and not output.endswith("\n") else ""
    header = f"{verdict.category}|{int(verdict.alive)}|{verdict.file_bytes}"
    return f"{header}\n{output}{gap}{message}".encode(errors="replace")


def parse_reply(reply: bytes) -> tuple[Verdict, str]:
    """The verdict and the text for the model. Raises ValueError."""
    header, _, text = reply.decode().partition("\n")
    fields = header.split("|")
    category, alive, held = fields if len(fields) == 3 else ("?", "", "")
    if category not in CODE_CATEGORIES | WARDEN_CATEGORIES or alive not in ("0", "1") or not held.isdecimal():
        raise ValueError(f"the warden sent an unknown header {header!r}")
    return Verdict(category, alive == "1", int(held)), text
