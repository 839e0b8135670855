"""Lists of numbers as short strings in JSON: a tenth of what their digits take, and read many times faster.

`"f4:eJz..."` is a kind, a colon, and base64 of zlib of the little-endian numbers, byte plane by byte plane: first the
lowest byte of each number, then the next one of each. Kinds: `i4`, `f4` and `f8` are numpy's; `e6` are millionths as
`i4`, whose least value stands for "no number".
"""

import base64
import zlib
from collections.abc import Sequence

import numpy as np

MILLIONTHS = 1e6
_NONE = np.iinfo(np.int32).min


def packed(values: Sequence[int] | Sequence[float]) -> str:
    """Exactly these: whole numbers of 32 bits, or floats, as single ones where that loses nothing."""
    if all(isinstance(value, int) for value in values):
        return _text("i4", np.asarray(values, dtype="<i4"))
    doubles = np.asarray(values, dtype="<f8")
    with np.errstate(over="ignore"):
        singles = doubles.astype("<f4")
    exact = np.array_equal(singles, doubles, equal_nan=True)
    return _text("f4", singles) if exact else _text("f8", doubles)


def packed_millionths(values: Sequence[float] | np.ndarray) -> str:
    """Rounded to six digits after the point. What is not finite, or beyond 2,000, becomes nan."""
    wanted = np.round(np.asarray(values, dtype=np.float64) * MILLIONTHS)
    with np.errstate(invalid="ignore"):
        known = np.abs(wanted) < -_NONE
    return _text("e6", np.where(known, wanted, _NONE).astype("<i4"))


def unpacked(text: str | Sequence[float | None]) -> np.ndarray:
    """`[n]` numbers of a packed string; or of a plain list, as earlier releases wrote it, None as nan. Raises
    ValueError for a string that is neither."""
    if not isinstance(text, str):
        return np.array(text, dtype=np.float64 if None in text or not text else None)
    kind, _, code = text.partition(":")
    if kind not in ("i4", "f4", "f8", "e6"):
        raise ValueError(f"numbers of kind '{kind[:10]}'; this version reads i4, f4, f8 and e6")
    try:
        planes = np.frombuffer(zlib.decompress(base64.b64decode(code)), dtype=np.uint8)
    except zlib.error as error:
        raise ValueError(f"packed numbers cannot be read: {error}") from error
    dtype = np.dtype("<i4" if kind == "e6" else f"<{kind}")
    numbers = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)
    return np.where(numbers == _NONE, np.nan, numbers / MILLIONTHS) if kind == "e6" else numbers


def _text(kind: str, numbers: np.ndarray) -> str:
    planes = np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, numbers.itemsize).T)
    return f"{kind}:{base64.b64encode(zlib.compress(planes.tobytes(), level=1)).decode()}"
