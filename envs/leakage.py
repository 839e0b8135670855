"""Leak checks: training questions equal or similar to test questions, and test questions in retrieved texts."""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

Verdict = Literal["leak", "review", "clear"]

# Calibrated on the AIME problems up to 2023 (919, no leaks) and the 14 of 2024 in the same public file (all
# leaks), each against the 30 problems of AIME 2024:
#   similarity    highest without a leak    lowest leak
#   Jaccard               .28                   .64
#   containment           .27                   .48
JACCARD_CHARS = 5
JACCARD_LEAK = 0.45
JACCARD_REVIEW = 0.30
CONTAINMENT_CHARS = 13
CONTAINMENT_LEAK = 0.60

_SHOWN_CHARS = 80
_FIGURE = re.compile(r"\[asy\].*?(?:\[/asy\]|\Z)", re.DOTALL)
_LATEX = re.compile(r"\\(?:begin|end) ?\{[^}]*\}|\\[a-z]+\*?|\\.|[${}]", re.DOTALL)
_WORD = re.compile(r"[^\W_]+")
_NOT_COMPARED = re.compile(r"[^\w+\-*/=<>^|!%]|_")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakCheck:
    """Result of comparing one training question with all test questions."""

    id: str
    verdict: Verdict
    rule: str | None
    """Rule that makes it a leak: "equal", "jaccard", "containment", or one of the data set; None without a leak."""
    score: float
    """Similarity in [0, 1] by that rule, or the Jaccard similarity without a leak."""
    test_index: int | None
    """Index of the most similar test question, None without any similarity."""


def check_leaks(train: Iterable[tuple[str, str]], test_questions: Sequence[str]) -> list[LeakCheck]:
    """Check each (id, question) of `train`, in order.

    A question leaks when it equals a test question up to case, spaces, punctuation and figures. Without
    LaTeX commands and stock phrases, it leaks when the character 5-grams of the two have a Jaccard similarity
    of at least JACCARD_LEAK, or when it has at least CONTAINMENT_LEAK of the test question's character
    13-grams. A similarity of JACCARD_REVIEW or more needs a manual review. Texts too short for an n-gram can only be
    equal; empty texts never match.

    The rule compares words rather than numbers: problems made from one template leak into each other.
    """
    tests = _Tests([_Text.of(question) for question in test_questions])
    return [tests.check(id, _Text.of(question)) for id, question in train]


def find_leaks(train: Iterable[tuple[str, str]], test_questions: Sequence[str]) -> list[str]:
    """Return the ids in `train`, (id, question) pairs, that leak by the rule of `check_leaks`, in order."""
    return [check.id for check in check_leaks(train, test_questions) if check.verdict == "leak"]


def write_leak_report(path: Path, checks: Sequence[LeakCheck], test_questions: Sequence[str]) -> None:
    """Write the leaks and the cases for review as JSON, each with the start of its test question.

    `test_questions` are those of the checks. Raises OSError if `path` cannot be written.
    """
    report = {
        "thresholds": {"jaccard": JACCARD_LEAK, "containment": CONTAINMENT_LEAK, "review": JACCARD_REVIEW},
        "checked": len(checks),
        "test_questions": len(test_questions),
        "dropped": [_entry(check, test_questions) for check in checks if check.verdict == "leak"],
        "review": [_entry(check, test_questions) for check in checks if check.verdict == "review"],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def question_share(question: str, texts: Iterable[str]) -> float:
    """Return the share of a question's character 13-grams that are in any of the retrieved `texts`, in [0, 1].

    From CONTAINMENT_LEAK on the question was retrieved, most likely with its answer. LaTeX commands, stock phrases,
    case, spaces and punctuation are ignored. A question without a 13-gram gives 0.
    """
    retrieved = frozenset[str]().union(*(_Text.of(text).long_grams for text in texts))
    return containment(_Text.of(question).long_grams, retrieved)


def word_grams(text: str, n: int) -> list[str]:
    """Return all runs of `n` words, in order, ignoring case, punctuation and LaTeX commands."""
    words = _WORD.findall(_LATEX.sub(" ", unicodedata.normalize("NFKC", text).casefold()))
    return [" ".join(words[start : start + n]) for start in range(len(words) - n + 1)]


def char_grams(text: str, n: int) -> frozenset[str]:
    """Return the set of runs of `n` characters."""
    return frozenset(text[start : start + n] for start in range(len(text) - n + 1))


def containment(part: frozenset[str], whole: frozenset[str]) -> float:
    """Return the share of `part` that is in `whole`, in [0, 1]; an empty part gives 0."""
    return len(part & whole) / len(part) if part else 0.0


@dataclass(frozen=True, slots=True)
class _Text:
    """A question, prepared once for many comparisons."""

    plain: str
    short_grams: frozenset[str]
    long_grams: frozenset[str]

    @classmethod
    def of(cls, question: str) -> "_Text":
        folded = _FIGURE.sub(" ", unicodedata.normalize("NFKC", question).casefold())
        words = " ".join(_LATEX.sub(" ", folded).split())
        core = _NOT_COMPARED.sub("", _BOILERPLATE.sub(" ", words))
        plain = _NOT_COMPARED.sub("", folded)
        return cls(plain, char_grams(core, JACCARD_CHARS), char_grams(core, CONTAINMENT_CHARS))


class _Tests:
    """Test questions indexed by their n-grams: the cost of a check grows with the shared n-grams only."""

    def __init__(self, texts: Sequence[_Text]) -> None:
        self._texts = texts
        self._plain, self._short, self._long = (defaultdict[str, list[int]](list) for _ in range(3))
        for index, text in enumerate(texts):
            self._plain[text.plain].append(index)
            for grams, holders in ((text.short_grams, self._short), (text.long_grams, self._long)):
                for gram in grams:
                    holders[gram].append(index)

    def check(self, id: str, question: _Text) -> LeakCheck:
        equal = self._plain.get(question.plain, []) if question.plain else []
        short = Counter(chain.from_iterable(self._short.get(gram, ()) for gram in question.short_grams))
        long = Counter(chain.from_iterable(self._long.get(gram, ()) for gram in question.long_grams))
        rule: str | None = None
        best, place = 0.0, 0
        for index in sorted({*equal, *short, *long}):
            test = self._texts[index]
            jaccard = short[index] / (len(question.short_grams) + len(test.short_grams) - short[index] or 1)
            contained = long[index] / (len(test.long_grams) or 1)
            found: str | None
            if index in equal:
                found, score = "equal", 1.0
            elif jaccard >= JACCARD_LEAK:
                found, score = "jaccard", jaccard
            elif contained >= CONTAINMENT_LEAK:
                found, score = "containment", contained
            else:
                found, score = None, jaccard
            if (found is not None, score) > (rule is not None, best):
                rule, best, place = found, score, index
        verdict: Verdict = "leak" if rule else "review" if best >= JACCARD_REVIEW else "clear"
        return LeakCheck(id=id, verdict=verdict, rule=rule, score=best, test_index=place if best else None)


def _entry(check: LeakCheck, test_questions: Sequence[str]) -> dict[str, str | float | None]:
    index = check.test_index
    return {
        "id": check.id,
        "rule": check.rule,
        "score": round(check.score, 4),
        "test_index": index,
        "test_question": None if index is None else test_questions[index][:_SHOWN_CHARS],
    }
