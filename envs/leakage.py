"""Leak checks: training questions equal or similar to test questions, and test questions in retrieved texts."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

# Calibrated on the AIME problems up to 2023 (919, no leaks) and the 14 of 2024 in the same public file (all
# leaks), each against the 30 problems of AIME 2024:
#   similarity    highest without a leak    lowest leak
#   Jaccard               .28                   .64
#   containment           .27                   .48
JACCARD_CHARS = 5
JACCARD_LEAK = 0.45
CONTAINMENT_CHARS = 13
CONTAINMENT_LEAK = 0.60

_FIGURE = re.compile(r"\[asy\].*?(?:\[/asy\]|\Z)", re.DOTALL)
_LATEX = re.compile(r"\\(?:begin|end) ?\{[^}]*\}|\\[a-z]+\*?|\\.|[${}]", re.DOTALL)
_WORD = re.compile(r"[^\W_]+")
_ASK = r"\b(?:find|compute|determine|calculate|evaluate|what is)"
_VARIABLES = r"\b[a-z]\b(?:[ ,]+(?:and )?[a-z]\b)*"
_BOILERPLATE = re.compile(
    "|".join(
        (
            r"\b(?:can|may) be (?:written|expressed)(?: uniquely)?(?: as| in the form(?: of)?)?",
            rf"(?:\b(?:where|with|and|for) )?{_VARIABLES} are (?:relatively prime|coprime)(?: positive)? integers",
            rf"(?:\b(?:where|with|and|for) )?(?:relatively prime|coprime)(?: positive)? integers {_VARIABLES}",
            r"(?:\band )?\b[a-z] is (?:a positive integer )?not divisible by the square of any prime",
            rf"{_ASK} (?:the value of )?\d*[a-z](?: ?\+ ?\d*[a-z]\b)+",
            rf"{_ASK} the remainder (?:when|if)",
            r"\bis divided by 10+\b",
        )
    )
)


def is_sign(char: str) -> bool:
    """Return whether a character that is no letter has a meaning: a vowel sign, a symbol or a mathematical sign."""
    kind = unicodedata.category(char)
    return char in "-*/^%‰⌊⌋⌈⌉⟨⟩" or (kind in ("Mn", "Mc", "Sm", "So", "Sc") and char not in "$\ufe0e\ufe0f")


def find_leaks(train: Iterable[tuple[str, str]], test_questions: Sequence[str]) -> list[str]:
    """Return the ids in `train`, (id, question) pairs, whose question leaks a test question, in order.

    A question leaks when it equals a test question up to case, spaces, punctuation and figures. Without LaTeX commands
    and stock phrases, it leaks when the character 5-grams of the two have a Jaccard similarity of at least
    JACCARD_LEAK, or when it has at least CONTAINMENT_LEAK of the test question's character 13-grams. Words count more
    than numbers: problems made from one template leak into each other.
    """
    tests = [_Text.of(question) for question in test_questions]
    plain = {test.plain for test in tests if test.plain}
    # Indexed by their n-grams, so that the cost of a check grows with the shared n-grams only. Their lengths differ.
    having: defaultdict[str, list[int]] = defaultdict(list)
    for index, test in enumerate(tests):
        for gram in test.short_grams | test.long_grams:
            having[gram].append(index)

    def num_shared(grams: Iterable[str]) -> Iterable[tuple[int, int]]:
        return Counter(chain.from_iterable(having.get(gram, ()) for gram in grams)).items()

    def leaks(question: _Text) -> bool:
        return (
            question.plain in plain
            or any(
                shared / (len(question.short_grams) + len(tests[index].short_grams) - shared) >= JACCARD_LEAK
                for index, shared in num_shared(question.short_grams)
            )
            or any(
                shared / len(tests[index].long_grams) >= CONTAINMENT_LEAK
                for index, shared in num_shared(question.long_grams)
            )
        )

    return [id for id, question in train if leaks(_Text.of(question))]


def question_share(question: str, texts: Iterable[str]) -> float:
    """Return the share of a question's character 13-grams that are in any of the retrieved `texts`, in [0, 1].

    From CONTAINMENT_LEAK on the question was retrieved, most likely with its answer.
    """
    grams = _Text.of(question).long_grams
    retrieved = frozenset[str]().union(*(_Text.of(text).long_grams for text in texts))
    return len(grams & retrieved) / len(grams) if grams else 0.0


def word_grams(text: str, n: int) -> list[str]:
    """Return all runs of `n` words, in order, ignoring case, punctuation and LaTeX commands."""
    words = _WORD.findall(_LATEX.sub(" ", unicodedata.normalize("NFKC", text).casefold()))
    return [" ".join(words[start : start + n]) for start in range(len(words) - n + 1)]


def char_grams(text: str, n: int) -> frozenset[str]:
    """Return the set of runs of `n` characters."""
    return frozenset(text[start : start + n] for start in range(len(text) - n + 1))


class _Text(NamedTuple):
    """A question, prepared once for many comparisons."""

    plain: str
    short_grams: frozenset[str]
    long_grams: frozenset[str]

    @classmethod
    def of(cls, question: str) -> "_Text":
        folded = _FIGURE.sub(" ", unicodedata.normalize("NFKC", question).casefold())
        words = " ".join(_LATEX.sub(" ", folded).split())
        core, plain = (
            "".join(sign for sign in text if sign.isalnum() or sign == "!" or is_sign(sign))
            for text in (_BOILERPLATE.sub(" ", words), folded)
        )
        return cls(plain, char_grams(core, JACCARD_CHARS), char_grams(core, CONTAINMENT_CHARS))
