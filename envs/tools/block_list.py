"""What no tool may bring in: pages of hosts that print benchmarks with the answers, and held-out questions."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx

from configs.wording import reason
from envs.leakage import word_grams

GRAM_WORDS = 13
"""A text that shares a run of so many words with a held-out question is taken for a copy of it."""
MIN_QUESTION_WORDS = 6
"""A shorter question than GRAM_WORDS is matched whole; one shorter than this is too common a phrase to be matched."""


class BlockList:
    """`hosts` block their subdomains too."""

    def __init__(self, hosts: Sequence[str] = (), questions: Iterable[str] = ()) -> None:
        self.hosts = tuple(host.strip(".").lower() for host in hosts)
        self._grams: dict[int, set[int]] = {}
        for question in questions:
            words = min(GRAM_WORDS, len(word_grams(question, 1)))
            if words >= MIN_QUESTION_WORDS:
                # Hashes, not texts: a benchmark has a million of them.
                self._grams.setdefault(words, set()).update(map(hash, word_grams(question, words)))

    def allows(self, url: str, text: str) -> bool:
        return not self.blocks_host(_host(url)) and not self.blocks_text(text)

    def blocks_host(self, host: str) -> bool:
        host = host.strip(".").lower()
        return any(host == blocked or host.endswith("." + blocked) for blocked in self.hosts)

    def blocks_text(self, text: str) -> bool:
        return any(not known.isdisjoint(map(hash, word_grams(text, words))) for words, known in self._grams.items())


def read_questions(path: Path) -> list[str]:
    """Held-out questions, one a line: plain text, or JSON with the field `question`.

    Raises ValueError where the file cannot be read or a JSON line has no question.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the questions to block cannot be read from '{path}': {reason(error)}") from None
    return [_question(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]


def _question(line: str, path: Path, number: int) -> str:
    if not line.startswith("{"):
        return line
    try:
        return str(json.loads(line)["question"])
    except (ValueError, KeyError):
        raise ValueError(f"line {number} of '{path}' is no JSON object with the field 'question'") from None


def _host(url: str) -> str:
    try:
        return httpx.URL(url).raw_host.decode()
    except httpx.InvalidURL:
        return ""
