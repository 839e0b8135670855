"""GAIA's quasi-exact match, by its published rules: numbers as numbers, lists element by element, text as text."""

import re
import string

MAX_CHARS = 1000

# Python's own float() would also take 1_000, nan, infinity and the digits of every alphabet.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_SEPARATOR = re.compile(r"[,;]")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))
_UNITS = str.maketrans(dict.fromkeys("$%,"))


def score_gaia(text: str, gold: str) -> float:
    """1.0 where the answer is the reference's number ($, % and commas aside), its list in the same order, or its
    words without white space, case and punctuation."""
    if len(text) > MAX_CHARS:
        return 0.0
    if _is_number(gold):
        return float(_number(text) == float(gold))
    if _SEPARATOR.search(gold):
        return float(_same_list(text, gold))
    return float(_plain(text) == _plain(gold))


def _same_list(text: str, gold: str) -> bool:
    found, wanted = _SEPARATOR.split(text), _SEPARATOR.split(gold)
    if len(found) != len(wanted):
        return False
    return all(
        _number(mine) == float(theirs)
        if _is_number(theirs)
        # Inside of a list punctuation tells elements apart.
        else _closed(mine) == _closed(theirs)
        for mine, theirs in zip(found, wanted, strict=True)
    )


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text.strip()) is not None


def _number(text: str) -> float | None:
    plain = text.translate(_UNITS).strip()
    return float(plain) if _NUMBER.fullmatch(plain) else None


def _closed(text: str) -> str:
    return "".join(text.lower().split())


def _plain(text: str) -> str:
    return _closed(text).translate(_PUNCTUATION)
