"""Scorers of text answers: exact match, GAIA's rules, letters of multiple choice."""

import re
import string
import unicodedata
from collections import Counter

MAX_CHARS = 1000

# An article precedes a word: the last letter of "hepatitis A" is not an article, nor is the first of "A, B".
_ARTICLES = re.compile(r"""(?<![\w.])(?:a|an|the)(?=["')\]]*\s+[^\w,;]*\w)""")
_ONLY_ARTICLES = frozenset(("a", "an", "the"))
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))
_NO_WORDS = re.compile(
    rf"""
    # A decimal point and a minus sign belong to a number.
    (?P<kept> (?<!\w)-(?=\.?[0-9]) | (?:(?<=[0-9])|(?<!\w))\.(?=[0-9]) )
    | (?<=[0-9]),(?=[0-9]{{3}}(?![0-9]))
    # Punctuation between two numbers keeps them apart, except a comma of thousands: 3/4 is not 34.
    | (?P<between> (?<=[0-9])[{re.escape(string.punctuation.replace("_", ""))}](?=[-+]?\.?[0-9]) )
    | [{re.escape(string.punctuation)}]""",
    re.VERBOSE,
)
_TYPOGRAPHY = str.maketrans(
    {**dict.fromkeys("‐‑‒–—−", "-"), **dict.fromkeys("‘’‚′", "'"), **dict.fromkeys("“”„″", '"')}
)
# These answers are right as a whole or not at all.
_CLOSED = frozenset(("yes", "no", "noanswer"))


def exact_match(text: str, gold: str) -> float:
    """Return 1.0 if the text equals one of the aliases in `gold`, one per line; too long an answer is wrong."""
    if len(text) > MAX_CHARS:
        return 0.0
    plain = normalize(text)
    return float(any(plain == normalize(alias) for alias in aliases(gold)))


def token_f1(text: str, gold: str) -> float:
    """Return the best F1 of shared words over the aliases in `gold`, one per line."""
    if len(text) > MAX_CHARS:
        return 0.0
    return max((_f1(normalize(text), normalize(alias)) for alias in aliases(gold)), default=0.0)


def aliases(gold: str) -> list[str]:
    """Return the right answers, one per non-blank line."""
    return [line for line in gold.split("\n") if line.strip()]


def normalize(text: str) -> str:
    """Remove case, punctuation and articles, except points and signs of numbers, unless nothing else is left."""
    typed = unicodedata.normalize("NFC", text).translate(_TYPOGRAPHY).lower()
    bare, *forms = (" ".join(form.split()) for form in (_worded(_ARTICLES.sub(" ", typed)), _worded(typed), typed))
    return next((plain for plain in forms if plain), "") if _ONLY_ARTICLES.issuperset(bare.split()) else bare


def _worded(typed: str) -> str:
    return _NO_WORDS.sub(lambda found: found["kept"] or (" " if found["between"] else ""), typed)


def _f1(text: str, alias: str) -> float:
    if text == alias:
        return 1.0
    if {text, alias} & _CLOSED:
        return 0.0
    found, wanted = text.split(), alias.split()
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0


# Python's float() also accepts 1_000, nan, infinity and the digits of every alphabet.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_SEPARATOR = re.compile(r"[,;]")
_UNITS = str.maketrans(dict.fromkeys("$%,"))


def score_gaia(text: str, gold: str) -> float:
    """Return 1.0 if the answer is the reference's number, list or text by GAIA's rules.

    Numbers ignore $, % and commas; lists keep their order; texts ignore white space, case and punctuation.
    """
    if len(text) > MAX_CHARS:
        return 0.0
    if _is_number(gold):
        return float(_number(text) == float(gold))
    if _SEPARATOR.search(gold):
        return float(_same_list(text, gold))
    return float(_gaia_plain(text) == _gaia_plain(gold))


def _same_list(text: str, gold: str) -> bool:
    found, wanted = _SEPARATOR.split(text), _SEPARATOR.split(gold)
    if len(found) != len(wanted):
        return False
    return all(
        _number(mine) == float(theirs)
        if _is_number(theirs)
        # Inside a list, punctuation separates elements.
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


def _gaia_plain(text: str) -> str:
    closed = _closed(text)
    return closed.translate(_PUNCTUATION) or closed


MAX_CHOICE_CHARS = 600

_GOLD = re.compile(r"([A-J])\. (.*\S)", re.DOTALL)
_LETTER = re.compile(
    r"""(\$?) [ ]* (?:\\boxed\{ [ ]* (?:\\text\{)?)? \(? [ ]* ([A-Ja-j]) [ ]* \)? (?:\}\}?)? [ ]* \1 [.:)]? [ ]*""",
    re.VERBOSE,
)
_WITH_TEXT = re.compile(r"\(?([A-J])(?:\)|[.:)]|\)[.:])[ ]+(\S.*)", re.DOTALL)


def score_choice(text: str, gold: str) -> float:
    """Compare a letter, or its text, with `gold` in the form `C. its text`. Raise ValueError for another form."""
    reference = _GOLD.fullmatch(gold)
    if reference is None:
        raise ValueError(f"the reference of a multiple-choice task looks like 'C. its text', got {gold!r}")
    letter, option = reference.groups()
    if len(text) > MAX_CHOICE_CHARS:
        return 0.0
    answer = text.strip()
    if alone := _LETTER.fullmatch(answer):
        return float(alone[2].upper() == letter and answer.count("{") == answer.count("}"))
    if (both := _WITH_TEXT.fullmatch(answer)) and both[1] == letter:
        answer = both[2]
    return float(_choice_plain(answer) == _choice_plain(option))


def _choice_plain(text: str) -> str:
    plain = " ".join(text.casefold().split())
    return plain.rstrip(".") or plain
