"""What crosses the process borders of the sandbox: its settings and tier, messages, verdicts, and bounded output."""

import codecs
import os
import signal
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from envs.kernel import SCOPED_VERSION

Tier = Literal["namespaces", "landlock"]
"""`namespaces` hides the host's files and processes, and has landlock too where the kernel has it. `landlock` denies
access to them and works under a container's default profile. Both have rlimits and seccomp."""
WantedTier = Literal["auto", "namespaces", "landlock"]

_ADVICE = {
    "namespaces": "allow user namespaces to this user or container",
    "landlock": f"use Linux 6.12 or later, which has landlock {SCOPED_VERSION}",
    "seccomp": "allow the system call seccomp to this user or container",
}

Lacks = Mapping[Tier, Mapping[str, str]]
"""For each tier the layers that this machine lacks, with the reasons. The stronger tier is first."""


def choose_tier(wanted: WantedTier, lacks: Lacks) -> Tier | None:
    """Return the wanted tier, or for `auto` the first, that lacks no layer; None if there is no such tier."""
    return next((tier for tier, missing in lacks.items() if wanted in ("auto", tier) and not missing), None)


def refusal(wanted: WantedTier, lacks: Lacks) -> str:
    """Return the message for a machine without a usable tier, with the remedies."""
    reasons, remedies = [], []
    for tier, missing in lacks.items():
        if wanted in ("auto", tier):
            layers = ", ".join(f"{layer} ({reason})" for layer, reason in missing.items())
            reasons.append(f"tier '{tier}' lacks {layers}")
            remedies += [_ADVICE[layer] for layer in missing]
    remedies += [f"set envs.sandbox={tier}" for tier, missing in lacks.items() if not missing]
    return f"the code sandbox cannot start: {'; '.join(reasons)}; {', or '.join(dict.fromkeys(remedies))}"


MAX_CODE_BYTES = 1 << 16
MAX_CPU_S = 600
"""CPU seconds of one code process over its whole life; each run has its own limit of wall-clock time."""
LAYERS = ("namespaces", "rlimits", "landlock", "seccomp")
"""namespaces: separate pids, network and IPC, and a private root. landlock and seccomp: limits on kernel calls."""

_COMPUTING = "cmath decimal fractions math mpmath numbers numpy random statistics sympy"
_STRUCTURE = "bisect collections copy dataclasses enum functools heapq itertools operator typing"
_TEXT = "calendar datetime json re string textwrap time"
ALLOWED_IMPORTS = frozenset(f"{_COMPUTING} {_STRUCTURE} {_TEXT}".split())


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """The tier of a sandbox, from `envs.sandbox`, and limits that tests lower."""

    memory_mb: int = 1024
    """Address space of one code process; about 160 MB of it are the libraries."""
    check_imports: bool = True
    """Reject imports that are not on the list with a clear message. This is not a boundary."""
    tier: WantedTier = "auto"
    """`auto` selects `namespaces` if the machine allows them, else `landlock`; without either no code is run."""
    idle_memory_mb: int = 2048
    """Private memory of all episodes between two steps together; above it the largest are ended."""
    disabled_layers: tuple[str, ...] = ()
    """Layers left out on purpose, to test the namespaces without them."""

    def __post_init__(self) -> None:
        if self.disabled_layers and (self.tier != "namespaces" or {*self.disabled_layers} - {"landlock", "seccomp"}):
            raise ValueError("only landlock and seccomp can be left out, and only with tier = 'namespaces'")


_CREDENTIALS = struct.Struct("3i")
_SENDER = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
MAX_MESSAGE_BYTES = 1 << 20
BORN = b"born"
"""First message of a code process; its sender tells the host the process id."""
READY = b"ready"
"""Message of a process that started; any other message holds the reason of the failure."""


def receive(link: socket.socket) -> bytes:
    """Receive a message. Raises ConnectionError if the other side closed the link."""
    message = link.recv(MAX_MESSAGE_BYTES)
    if not message:
        raise ConnectionError("the other side closed the connection")
    return message


def receive_from(link: socket.socket) -> tuple[bytes, int]:
    """Receive a message and its sender's process id from the kernel; the link must pass credentials."""
    message, ancillary, _, _ = link.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
    senders = [data for level, kind, data in ancillary if (level, kind) == _SENDER]
    if not message or not senders:
        raise ConnectionError("the other side closed the connection")
    pid, _, _ = _CREDENTIALS.unpack(senders[0])
    return message, pid


_LENGTH = struct.Struct("!I")


def encode_frame(payload: bytes) -> bytes:
    """Return a message for a pipe, which does not keep messages apart."""
    return _LENGTH.pack(len(payload)) + payload


def split_frame(data: bytes) -> tuple[bytes, bytes] | None:
    """Return the first frame in `data` and the bytes after it, or None while the frame is incomplete."""
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a frame of {length} bytes exceeds {MAX_MESSAGE_BYTES}")
    end = _LENGTH.size + length
    return (data[_LENGTH.size : end], data[end:]) if len(data) >= end else None


_HALF_CAPACITY = 1 << 16
# Looked up at import: the lookup opens a file, which a warden may not.
_ESCAPED = codecs.getencoder("unicode_escape")


class BoundedOutput:
    """Output of a run in bounded memory: the first and the last 64 KiB, and a count of all bytes."""

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
    """Decode with visible escapes for control, format and surrogate characters, which a terminal would obey."""
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else _ESCAPED(letter)[0].decode() for letter in text
    )


def cut_middle(text: str, max_chars: int) -> str:
    half = max_chars // 2
    return text if len(text) <= max_chars else _joined(text[:half], len(text) - 2 * half, text[-half:])


def _joined(head: str, num_left_out: int, tail: str) -> str:
    return f"{head}\n... [{num_left_out} characters left out] ...\n{tail}"


REQUEST_HEADER = struct.Struct("!d")
"""Limit of wall-clock seconds; the source follows."""
CODE_CATEGORIES = frozenset({"", "syntax", "forbidden-import", "exception", "memory"})
"""Categories that a code process may report about itself. The warden decides on time, output and crashes."""
WARDEN_CATEGORIES = frozenset({"timeout", "output", "crashed", "disk"})
_MAX_ANSWER_BYTES = 1 << 16
_MAX_MESSAGE_CHARS = 4000
_INVALID_ANSWER = b"exception\nThe answer of the process is invalid."


class CellEndedError(Exception):
    """The code process ended, by itself or by the warden."""

    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category


def death_of(status: int, *, cpu_used_up: bool) -> CellEndedError:
    """Return the reason of a code process's end from its wait status."""
    if os.WIFEXITED(status):
        return CellEndedError("crashed", f"The process ended itself with exit code {os.WEXITSTATUS(status)}.")
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and cpu_used_up:
        return CellEndedError("timeout", "All CPU time of this episode is used up.")
    if number == signal.SIGKILL:
        return CellEndedError("memory", "The system ended the process for its use of memory.")
    return CellEndedError("crashed", f"The process crashed ({signal.Signals(number).name}).")


def find_answer(received: bytes, nonce: bytes) -> tuple[bytes | None, bytes]:
    """Return the answer that starts with `nonce` and the bytes after it; other answers are of earlier runs."""
    if len(received) > _MAX_ANSWER_BYTES:
        return _INVALID_ANSWER, b""
    try:
        while (split := split_frame(received)) is not None:
            frame, received = split
            if frame.startswith(nonce):
                return frame[len(nonce) :], received
    except ConnectionError:
        return _INVALID_ANSWER, b""
    return None, received


def parse_answer(answer: bytes) -> tuple[str, str]:
    """Return category and message. The code can forge the answer, but only about itself."""
    category, _, message = printable_text(answer).partition("\n")
    if category not in CODE_CATEGORIES:
        return parse_answer(_INVALID_ANSWER)
    return category, cut_middle(message, _MAX_MESSAGE_CHARS)


def encode_reply(category: str, *, alive: bool, file_bytes: int, output: str, message: str) -> bytes:
    """Encode the outcome of a run. `file_bytes` is what its files occupy beyond the memory of the process."""
    gap = "\n" if output and message and not output.endswith("\n") else ""
    return f"{category}|{int(alive)}|{file_bytes}\n{output}{gap}{message}".encode(errors="replace")


def parse_reply(reply: bytes) -> tuple[str, bool, int, str]:
    """Return category, `alive`, `file_bytes` and the text for the model. Raises ValueError for an unknown header."""
    header, _, text = reply.decode().partition("\n")
    category, alive, held = fields if len(fields := header.split("|")) == 3 else ("?", "", "")
    if category not in CODE_CATEGORIES | WARDEN_CATEGORIES or alive not in ("0", "1") or not held.isdecimal():
        raise ValueError(f"the warden sent an unknown header {header!r}")
    return category, alive == "1", int(held), text
