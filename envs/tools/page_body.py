"""The bytes of a page: read up to a cap, decompressed up to the same cap, and turned into text."""

import codecs
import zlib
from collections.abc import AsyncIterable
from email.message import Message

_DETECTED_BYTES = 50_000
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
# Python knows more codecs than the web: some do not give text, and some take quadratic time.
_WEB_CODECS = ("utf-8", "utf-16", "ascii", "iso8859", "cp125", "cp932", "koi8", "shift_jis", "euc", "gb", "big5")


class BodyError(ValueError):
    """A body that cannot be read; the message says why."""


async def read_body(chunks: AsyncIterable[bytes], coding: str, max_bytes: int) -> tuple[bytes, bool]:
    """The decompressed body, and whether it was cut at `max_bytes`. Never more than that is held, however much the
    server sends or its compressed bytes would become. Raises BodyError."""
    if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise BodyError("it is compressed in a way that is not supported")
    unpack = zlib.decompressobj(_GZIP_OR_ZLIB) if coding not in ("", "identity") else None
    body = bytearray()
    num_read = 0
    async for chunk in chunks:
        num_read += len(chunk)
        try:
            body += unpack.decompress(chunk, max_bytes + 1 - len(body)) if unpack else chunk
        except zlib.error:
            raise BodyError("its compression is broken") from None
        # What is read counts too: a compressed stream can go on for ever and become nothing.
        if max(len(body), num_read) > max_bytes:
            return bytes(body[:max_bytes]), True
    return bytes(body), False


def media_type(content_type: str) -> tuple[str, str]:
    """Type and declared charset of a Content-Type header, in lower case; empty where it says nothing."""
    header = Message()
    header["Content-Type"] = content_type
    return (header.get_content_type() if content_type.strip() else ""), str(header.get_content_charset() or "")


def decode_body(body: bytes, charset: str) -> str:
    """Text in the declared charset, in UTF-8, or in whichever fits best; what fits none becomes U+FFFD."""
    for name in (charset, "utf-8"):
        codec = _codec(name)
        if codec is not None:
            try:
                # Incremental: a character that the cap cut in two is no error.
                return codec.incrementaldecoder("strict").decode(body)
            except UnicodeDecodeError:
                continue
    return body.decode(_detected(body), errors="replace")


def _codec(name: str) -> codecs.CodecInfo | None:
    try:
        codec = codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    return codec if codec.name.startswith(_WEB_CODECS) else None


def _detected(body: bytes) -> str:
    from charset_normalizer import from_bytes

    best = from_bytes(body[:_DETECTED_BYTES]).best()
    return best.encoding if best and _codec(best.encoding) else "utf-8"
