"""Lists of numbers as short strings in JSON: a tenth of what their digits take, and read many times faster.

`"f4=AAC..."` is a kind, a sign, and base64 of the little-endian numbers: plain after `=`; after `:` byte plane by byte
plane, first the lowest byte of each number, then the next one of each, and then through zlib. Only what zlib makes much
shorter goes through it, for it costs more time than all else: not the numbers of a short turn. Kinds: `u2`, `i4`, `f4`
and `f8` are numpy's; `e6` are millionths as `i4`, whose least value stands for "no number".
"""

import base64
import zlib
from collections.abc import Sequence

import numpy as np

FEW = 128
"""Fewer numbers are not worth a call of zlib: some 10 microseconds for a hundred bytes."""
MILLIONTHS = 1e6
_NONE = np.iinfo(np.int32).min


def packed(values: Sequence[int] | Sequence[float]) -> str:
    """Exactly these: whole numbers of 32 bits, or floats, as single ones where that loses nothing."""
    numbers = np.asarray(values)
    if not numbers.size or numbers.dtype.kind in "iu":
        return _whole(numbers)
    doubles = np.asarray(values, dtype="<f8")
    with np.errstate(over="ignore"):
        singles = doubles.astype("<f4")
    exact = np.array_equal(singles, doubles, equal_nan=True)
    return _plain("f4", singles) if exact else _short("f8", doubles)


def packed_millionths(values: Sequence[float] | np.ndarray) -> str:
    """Rounded to six digits after the point. What is not finite, or beyond 2,000, becomes nan."""
    wanted = np.round(np.asarray(values, dtype=np.float64) * MILLIONTHS)
    with np.errstate(invalid="ignore"):
        known = np.abs(wanted) < -_NONE
    return _short("e6", np.where(known, wanted, _NONE).astype("<i4"))


def unpacked(text: str | Sequence[float | None]) -> np.ndarray:
    """`[n]` numbers of a packed string; or of a plain list, as earlier releases wrote it, None as nan. Raises
    ValueError for a string that is neither."""
    if not isinstance(text, str):
        return np.array(text, dtype=np.float64 if None in text or not text else None)
    kind, sign, code = text[:2], text[2:3], text[3:]
    if kind not in ("u2", "i4", "f4", "f8", "e6") or sign not in ("=", ":"):
        raise ValueError(f"numbers of kind '{text[:3]}'; this version reads u2, i4, f4, f8 and e6, with = or :")
    dtype = np.dtype("<i4" if kind == "e6" else f"<{kind}")
    try:
        data = base64.b64decode(code)
        if sign == ":":
            planes = np.frombuffer(zlib.decompress(data), dtype=np.uint8)
            data = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).tobytes()
        numbers = np.frombuffer(data, dtype=dtype)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"packed numbers cannot be read: {error}") from error
    return np.where(numbers == _NONE, np.nan, numbers / MILLIONTHS) if kind == "e6" else numbers


def _whole(numbers: np.ndarray) -> str:
    """Raises OverflowError beyond 32 bits."""
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    if low >= 0 and high < 2**16:
        return _plain("u2", numbers.astype("<u2"))
    if not _NONE <= low <= high <= -_NONE - 1:
        raise OverflowError(f"whole numbers of 32 bits are packed, got {low} to {high}")
    return _short("i4", numbers.astype("<i4"))


def _plain(kind: str, numbers: np.ndarray) -> str:
    return f"{kind}={base64.b64encode(numbers.tobytes()).decode()}"


def _short(kind: str, numbers: np.ndarray) -> str:
    if len(numbers) < FEW:
        return _plain(kind, numbers)
    planes = np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, numbers.itemsize).T)
    return f"{kind}:{base64.b64encode(zlib.compress(planes.tobytes(), level=1)).decode()}"
