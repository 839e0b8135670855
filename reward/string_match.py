"""Exact match and token F1 of short answers, as SQuAD and HotpotQA score them.

Compared are words in lower case, without ASCII punctuation and English articles. Typographic dashes and quotes count
as the ASCII ones, and composed letters as their composed form, which the published scorers leave to chance.
"""

import re
import string
import unicodedata
from collections import Counter

MAX_CHARS = 1000

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))
_TYPOGRAPHY = str.maketrans(
    {**dict.fromkeys("‐‑‒–—−", "-"), **dict.fromkeys("‘’‚′", "'"), **dict.fromkeys("“”„″", '"')}
)
# A partly right "yes" does not exist: these are right as a whole or not at all.
_CLOSED = frozenset(("yes", "no", "noanswer"))


def exact_match(text: str, gold: str) -> float:
    """1.0 where the text equals one of the aliases in `gold`, one a line; an answer that is too long is wrong."""
    if len(text) > MAX_CHARS:
        return 0.0
    plain = normalize(text)
    return float(any(plain == normalize(alias) for alias in gold.split("\n")))


def token_f1(text: str, gold: str) -> float:
    """The best harmonic mean of the shares of shared words, over the aliases in `gold`, one a line."""
    if len(text) > MAX_CHARS:
        return 0.0
    return max(_f1(normalize(text), normalize(alias)) for alias in gold.split("\n"))


def normalize(text: str) -> str:
    plain = unicodedata.normalize("NFC", text).translate(_TYPOGRAPHY).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _f1(text: str, alias: str) -> float:
    if text == alias:
        return 1.0
    if {text, alias} & _CLOSED:
        return 0.0
    found, wanted = text.split(), alias.split()
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0
