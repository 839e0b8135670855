"""Scorers of text answers: exact match, GAIA's rules, letters of multiple choice."""

import re
import string
import unicodedata
from collections import Counter
from fractions import Fraction

from reward.scorers.notation import plain, read_number, ungrouped, unwrapped

MAX_CHARS = 1000

# An article precedes a word: the last letter of "hepatitis A" is not an article, nor is the first of "A, B".
_ARTICLES = re.compile(r"""(?<![\w.])(?:a|an|the)(?=["')\]]*\s+[^\w,;]*\w)""")
_ONLY_ARTICLES = frozenset(("a", "an", "the"))
_NO_WORDS = re.compile(
    rf"""
    # A decimal point and a minus sign belong to a number, and so does what makes another value of it.
    (?P<kept> (?<!\w)-(?=\.?[0-9]) | (?:(?<=[0-9])|(?<!\w))\.(?=[0-9]) | (?<=[0-9])[%!] | [<>](?=[ ]*[-+]?\.?[0-9])
        | (?<=[0-9])[/^*:_](?=[\[({{]*[-+]?\.?[0-9]) )
    # Punctuation between two numbers keeps them apart, except a comma of thousands: 3, 4 is not 34.
    | (?P<between> (?<=[0-9])[{re.escape(string.punctuation)}](?=[-+]?\.?[0-9]) )
    | [{re.escape(string.punctuation)}]""",
    re.VERBOSE,
)
_BEFORE_PERCENT = re.compile(r"(?<=[0-9])(?:\s+\\?|\\)%")
# These answers are right as a whole or not at all.
_CLOSED = frozenset(("yes", "no", "noanswer"))


def exact_match(text: str, gold: str) -> float:
    """Return 1.0 if the text equals one of the aliases in `gold`, one per line; too long an answer is wrong."""
    if len(text) > MAX_CHARS:
        return 0.0
    answer = normalize(text)
    return float(any(answer == normalize(alias) for alias in aliases(gold)))


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
    typed = _typed(text)
    bare, *forms = (" ".join(form.split()) for form in (_worded(_ARTICLES.sub(" ", typed)), _worded(typed), typed))
    return next((form for form in forms if form), "") if _ONLY_ARTICLES.issuperset(bare.split()) else bare


def _typed(text: str) -> str:
    return _BEFORE_PERCENT.sub("%", ungrouped(unwrapped(plain(text)).replace("⁄", "/").lower()))


def _worded(typed: str) -> str:
    # Punctuation of other scripts is like a comma, but for the signs of per mille.
    typed = "".join(
        "," if sign > "\x7f" and sign not in "‰‱" and unicodedata.category(sign)[0] == "P" else sign for sign in typed
    )
    return _NO_WORDS.sub(lambda found: found["kept"] or (" " if found["between"] else ""), typed)


def _f1(text: str, alias: str) -> float:
    if text == alias:
        return 1.0
    if {text, alias} & _CLOSED:
        return 0.0
    found, wanted = text.split(), alias.split()
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0


_SEPARATOR = re.compile("[,;、،؛]")


def score_gaia(text: str, gold: str) -> float:
    """Return 1.0 if the answer is the reference's number, list or text by GAIA's rules."""
    if len(text) > MAX_CHARS:
        return 0.0
    wanted = plain(gold)
    if _SEPARATOR.search(wanted):
        return float(_same_list(unwrapped(plain(text)), wanted))
    if (number := _wanted_number(wanted)) is not None:
        return float(_number(text) == number)
    answer, reference = (_closed(_worded(typed) or typed) for typed in (_typed(text), _typed(gold)))
    return float(answer == reference)


_GAIA_BLANKS = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")


def _same_list(text: str, gold: str) -> bool:
    found, wanted = _SEPARATOR.split(text), _SEPARATOR.split(gold)
    # Inside a list, punctuation separates elements.
    return len(found) == len(wanted) and all(
        _closed(mine) == _closed(theirs) if (number := _wanted_number(theirs)) is None else _number(mine) == number
        for mine, theirs in zip(found, wanted, strict=True)
    )


def _number(text: str) -> Fraction | None:
    return read_number(plain(text).rstrip().removesuffix("%").removesuffix("\\"))


def _wanted_number(gold: str) -> Fraction | None:
    return None if gold.rstrip().endswith("%") else read_number(gold)


def _closed(text: str) -> str:
    return _GAIA_BLANKS.sub("", text.strip().lower())


MAX_CHOICE_CHARS = 600

_GOLD = re.compile(r"([A-J])\. (.*\S)", re.DOTALL)
_LETTER = re.compile(
    r"""(?:(?:the\s+)?(?:option|choice|answer)\s*:?\s*)?[\[({<"']*\s*([A-J])\s*[])}>"']*[.:)]?""", re.IGNORECASE
)
_WITH_TEXT = re.compile(r"(\*\*|)(?:(?:[Oo]ption|[Cc]hoice)\s+)?\(?([A-J])(?:\)|[.:)]|\)[.:])\1\s+(\S.*)", re.DOTALL)


def score_choice(text: str, gold: str) -> float:
    """Compare a letter, or its text, with `gold` in the form `C. its text`. Raise ValueError for another form."""
    reference = _GOLD.fullmatch(gold)
    if reference is None:
        raise ValueError(f"the reference of a multiple-choice task looks like 'C. its text', got {gold!r}")
    letter, option = reference.groups()
    if len(text) > MAX_CHOICE_CHARS:
        return 0.0
    answer = unwrapped(plain(text))
    if alone := _LETTER.fullmatch(re.sub(r"[*_`]", "", answer)):
        return float(alone[1].upper() == letter)
    if (both := _WITH_TEXT.fullmatch(answer)) and both[2] == letter:
        answer = both[3]
    return float(_choice_plain(answer) == _choice_plain(option))


def _choice_plain(text: str) -> str:
    words = " ".join(unwrapped(plain(text)).casefold().split())
    return words.rstrip(".") or words
