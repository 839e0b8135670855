"""Leaks: training questions that are questions of a test set, in other words or other LaTeX; questions in what was
retrieved."""

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
    """What comparing one training question with all test questions gave.

    `rule` is the rule that made it a leak: "equal", "jaccard", "containment", or one of the data set's own;
    None without a leak. `score` in [0, 1] is the similarity by that rule, or the Jaccard similarity without
    a leak. `test_index` is the place of the most similar test question, None where nothing is similar.
    """

    id: str
    verdict: Verdict
    rule: str | None
    score: float
    test_index: int | None


def check_leaks(train: Iterable[tuple[str, str]], test_questions: Sequence[str]) -> list[LeakCheck]:
    """One check for each (id, question) of `train`, in order.

    A question leaks when it equals a test question up to case, spaces, punctuation and figures. Without
    LaTeX commands and stock phrases, it leaks when the character 5-grams of the two have a Jaccard similarity
    of at least JACCARD_LEAK, or when it holds at least CONTAINMENT_LEAK of the test question's character
    13-grams. From JACCARD_REVIEW on, a person should look. Texts too short for an n-gram can only be equal;
    empty ones never match.

    The rule reads words, not numbers: problems made from one template leak into each other by it.
    """
    tests = _Tests([_Text.of(question) for question in test_questions])
    return [tests.check(id, _Text.of(question)) for id, question in train]


def find_leaks(train: Iterable[tuple[str, str]], test_questions: Sequence[str]) -> list[str]:
    """The ids in `train`, (id, question) pairs, that leak by the rule of `check_leaks`, in order."""
    return [check.id for check in check_leaks(train, test_questions) if check.verdict == "leak"]


def write_leak_report(path: Path, checks: Sequence[LeakCheck], test_questions: Sequence[str]) -> None:
    """The leaks and the cases for review as JSON, each with the start of its test question.

    `test_questions` are those of the checks. Raises OSError where `path` cannot be written.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieved:
    """What the tools of one attempt at a task brought in."""

    id: str
    question: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalAudit:
    """How much of each question was found in what was retrieved for it.

    `shares`: for each attempt, its id and a number in [0, 1]. `num_searched` attempts retrieved anything. `leaked` are
    the ids of those with a share of at least CONTAINMENT_LEAK: the question itself was found, most likely with its
    answer.
    """

    shares: tuple[tuple[str, float], ...]
    num_searched: int
    leaked: tuple[str, ...]


def audit_retrieved(attempts: Iterable[Retrieved]) -> RetrievalAudit:
    """The leakage audit of an evaluation, over every attempt whose tools could search."""
    rows = [(one.id, question_share(one.question, one.texts), any(map(str.strip, one.texts))) for one in attempts]
    return RetrievalAudit(
        shares=tuple((id, share) for id, share, _ in rows),
        num_searched=sum(searched for _, _, searched in rows),
        leaked=tuple(id for id, share, _ in rows if share >= CONTAINMENT_LEAK),
    )


def question_share(question: str, texts: Iterable[str]) -> float:
    """The share of a question's character 13-grams that stands in any of `texts`, in [0, 1].

    LaTeX commands, stock phrases, case, spaces and punctuation do not count. 0 for a question too short for one.
    """
    found = frozenset[str]().union(*(_Text.of(text).long_grams for text in texts))
    return containment(_Text.of(question).long_grams, found)


def word_grams(text: str, n: int) -> list[str]:
    """Every run of `n` words, in order; none in a shorter text. Case, punctuation and LaTeX commands do not count."""
    words = _WORD.findall(_LATEX.sub(" ", unicodedata.normalize("NFKC", text).casefold()))
    return [" ".join(words[start : start + n]) for start in range(len(words) - n + 1)]


def char_grams(text: str, n: int) -> frozenset[str]:
    """The different runs of `n` characters; none in a shorter text."""
    return frozenset(text[start : start + n] for start in range(len(text) - n + 1))


def containment(part: frozenset[str], whole: frozenset[str]) -> float:
    """The share of `part` that is in `whole`, in [0, 1]; 0 of an empty part."""
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
    """The test questions by their n-grams: a check costs what is shared with them, and not their number."""

    def __init__(self, texts: Sequence[_Text]) -> None:
        self._texts = texts
        self._plain, self._short, self._long = (defaultdict[str, list[int]](list) for _ in range(3))
        for index, text in enumerate(texts):
            if text.plain:
                self._plain[text.plain].append(index)
            for gram in text.short_grams:
                self._short[gram].append(index)
            for gram in text.long_grams:
                self._long[gram].append(index)

    def check(self, id: str, question: _Text) -> LeakCheck:
        equal = self._plain.get(question.plain, [])
        short = Counter(chain.from_iterable(self._short.get(gram, ()) for gram in question.short_grams))
        long = Counter(chain.from_iterable(self._long.get(gram, ()) for gram in question.long_grams))
        matches = [
            (*self._compare(question, index, short[index], long[index], is_equal=index in equal), index)
            for index in sorted({*equal, *short, *long})
        ]
        rule, score, index = max(matches, key=lambda match: (match[0] is not None, match[1]), default=(None, 0.0, 0))
        verdict: Verdict = "leak" if rule else "review" if score >= JACCARD_REVIEW else "clear"
        return LeakCheck(id=id, verdict=verdict, rule=rule, score=score, test_index=index if score else None)

    def _compare(
        self, question: _Text, index: int, short: int, long: int, *, is_equal: bool
    ) -> tuple[str | None, float]:
        """The first rule that fires and the similarity by it; without one, the Jaccard similarity. `short` and `long`
        count the n-grams that both have."""
        test = self._texts[index]
        if is_equal:
            return "equal", 1.0
        union = len(question.short_grams) + len(test.short_grams) - short
        similarity = short / union if short else 0.0
        if similarity >= JACCARD_LEAK:
            return "jaccard", similarity
        contained = long / len(test.long_grams) if long else 0.0
        if contained >= CONTAINMENT_LEAK:
            return "containment", contained
        return None, similarity


def _entry(check: LeakCheck, test_questions: Sequence[str]) -> dict[str, str | float | None]:
    index = check.test_index
    return {
        "id": check.id,
        "rule": check.rule,
        "score": round(check.score, 4),
        "test_index": index,
        "test_question": None if index is None else test_questions[index][:_SHOWN_CHARS],
    }
