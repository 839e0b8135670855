"""What the code printed, bounded in memory and made safe for logs and prompts."""

import codecs

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
