"""Length-prefixed bytes, the only thing that crosses a process border of the sandbox."""

import socket
import struct

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
_SENDER = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
MAX_FRAME_BYTES = 1 << 20
BORN = b"born"
"""What a code process says before it drops its rights, so that the host learns which process it is."""
READY = b"ready"
"""What a new process says first when all went well; anything else is the reason why not."""


class FrameError(ConnectionError):
    """The other side went away, or does not keep to the protocol."""


def encode_frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def send_frame(link: socket.socket, payload: bytes) -> None:
    link.sendall(encode_frame(payload))


def receive_frame(link: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive_exactly(link, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return _receive_exactly(link, length)


def receive_frame_from(link: socket.socket) -> tuple[bytes, int]:
    """A frame and the process that sent it, as the kernel names it here; the link must pass credentials."""
    header, ancillary, _, _ = link.recvmsg(_LENGTH.size, socket.CMSG_SPACE(_CREDENTIALS.size))
    header += _receive_exactly(link, _LENGTH.size - len(header)) if header else b""
    senders = [data for level, kind, data in ancillary if (level, kind) == _SENDER]
    if not header or not senders:
        raise FrameError("the other side closed the connection")
    pid, _, _ = _CREDENTIALS.unpack(senders[0])
    return _receive_exactly(link, _LENGTH.unpack(header)[0]), pid


def _receive_exactly(link: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        chunk = link.recv(count - len(received))
        if not chunk:
            raise FrameError("the other side closed the connection")
        received += chunk
    return bytes(received)


def split_frame(data: bytes) -> tuple[bytes, bytes] | None:
    """The first frame in `data` and what follows it, or None while it is not complete."""
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    end = _LENGTH.size + length
    return (data[_LENGTH.size : end], data[end:]) if len(data) >= end else None
