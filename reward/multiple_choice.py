"""The letter of a multiple-choice answer.

Right are the letter, alone or in brackets, boxed or $-wrapped; the letter with its own option's text; and that text
by itself. Two letters, or a letter with another option's text, are no answer.
"""

import re

MAX_CHARS = 600

_GOLD = re.compile(r"([A-J])\. (.*\S)", re.DOTALL)
_LETTER = re.compile(
    r"""(\$?) [ ]* (?:\\boxed\{ [ ]* (?:\\text\{)?)? \(? [ ]* ([A-Ja-j]) [ ]* \)? (?:\}\}?)? [ ]* \1 [.:)]? [ ]*""",
    re.VERBOSE,
)
_WITH_TEXT = re.compile(r"\(?([A-J])(?:\)|[.:)]|\)[.:])[ ]+(\S.*)", re.DOTALL)


def score_choice(text: str, gold: str) -> float:
    """`gold` is `C. its text`. Raises ValueError for another form of it."""
    reference = _GOLD.fullmatch(gold)
    if reference is None:
        raise ValueError(f"the reference of a multiple-choice task looks like 'C. its text', got {gold!r}")
    letter, option = reference.groups()
    if len(text) > MAX_CHARS:
        return 0.0
    answer = text.strip()
    if alone := _LETTER.fullmatch(answer):
        return float(alone[2].upper() == letter and answer.count("{") == answer.count("}"))
    if (both := _WITH_TEXT.fullmatch(answer)) and both[1] == letter:
        answer = both[2]
    return float(_plain(answer) == _plain(option))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
