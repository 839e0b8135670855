"""Wrappers around every tool that returns outside text: a block list, a cache, and marks of foreign text."""

import asyncio
import json
import os
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from configs.api_keys import without_secrets
from configs.errors import UserError, reason, whole_letters
from envs.leakage import word_grams
from envs.types import Tool, ToolResult, ToolUnavailableError

GRAM_WORDS = 13
"""A text that shares a run of this many words with a held-out question is treated as a copy of it."""
MIN_QUESTION_WORDS = 6
"""Questions shorter than GRAM_WORDS are matched as a whole, but those below this are too common to be matched."""
MAX_TEXT_CHARS = 100_000
BLOCKED = "The result is left out: it holds a question of a benchmark."


class BlockList:
    """Hosts, with their subdomains, and held-out questions that no result may contain."""

    def __init__(self, hosts: Sequence[str] = (), questions: Iterable[str] = ()) -> None:
        self._hosts = tuple((_host(f"http://{host.strip('.')}/") or host).lower() for host in hosts)
        self._grams: dict[int, set[int]] = {}
        for question in questions:
            words = min(GRAM_WORDS, len(word_grams(question, 1)))
            if words >= MIN_QUESTION_WORDS:
                # Hashes save memory: a benchmark can have a million n-grams.
                self._grams.setdefault(words, set()).update(map(hash, word_grams(question, words)))

    def allows(self, url: str, text: str) -> bool:
        return not self.blocks_host(_host(url)) and not self.blocks_text(text)

    def blocks_host(self, host: str) -> bool:
        host = host.strip(".").lower()
        return any(host == blocked or host.endswith("." + blocked) for blocked in self._hosts)

    def blocks_text(self, text: str) -> bool:
        """Return whether the text holds a held-out question."""
        return any(not known.isdisjoint(map(hash, word_grams(text, words))) for words, known in self._grams.items())


def _host(url: str) -> str:
    try:
        return httpx.URL(url).raw_host.decode()
    except httpx.InvalidURL:
        return ""


def read_questions(path: Path) -> list[str]:
    """Read held-out questions, one per line: plain text, or JSON with the field `question`; raises UserError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        questions = [str(json.loads(line)["question"]) if line.startswith("{") else line for line in lines]
    except (OSError, ValueError, KeyError, RecursionError) as error:
        problem = f"'{path}' cannot be read, plain or as JSON with the field 'question': {reason(error)}"
        raise UserError(f"envs.web.blocked_questions: {problem}") from None
    return [question for question in questions if question.strip()]


class CachedTool:
    """A cache of a tool's answers, by least recent use, without failures; equal calls share one running request."""

    def __init__(self, tool: Tool, *, max_entries: int) -> None:
        self.name = tool.name
        self.description = tool.description
        self._tool = tool
        self._max_entries = max_entries
        self._answers: OrderedDict[str, asyncio.Future[ToolResult]] = OrderedDict()

    async def call(self, arguments: str) -> ToolResult:
        key = arguments.strip()
        if key not in self._answers:
            answer = self._answers[key] = asyncio.ensure_future(self._tool.call(key))
            answer.add_done_callback(lambda done: self._drop_failure(key, done))
            while len(self._answers) > self._max_entries:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        # Shielded, so that a caller that gives up does not cancel the request of the others.
        return await asyncio.shield(self._answers[key])

    def _drop_failure(self, key: str, done: asyncio.Future[ToolResult]) -> None:
        failed = done.cancelled() or done.exception() is not None or done.result().error is not None
        if failed and self._answers.get(key) is done:
            del self._answers[key]


class GuardedTool:
    """A tool whose results are marked as foreign, checked for benchmark text, and bounded in size and time.

    Any exception becomes ToolUnavailableError: a fault of a custom tool leaves an attempt unscored and ends no run.
    """

    def __init__(self, tool: Tool, block_list: BlockList, *, time_limit_s: float) -> None:
        self.name = tool.name
        self.description = tool.description
        self._tool = tool
        self._block_list = block_list
        self._time_limit_s = time_limit_s

    async def call(self, arguments: str) -> ToolResult:
        with faults_of(self.name):
            try:
                async with asyncio.timeout(self._time_limit_s):
                    result = await self._tool.call(whole_letters(arguments))
            except TimeoutError:
                raise ToolUnavailableError(f"{self.name} gave no result within {self._time_limit_s:g} s") from None
            if not isinstance(result, ToolResult):
                raise ToolUnavailableError(f"{self.name} returned {type(result).__name__}, not a ToolResult")
        # First redacted, because half of a key would not be found.
        text = whole_letters(without_secrets(result.text[: 2 * MAX_TEXT_CHARS])[:MAX_TEXT_CHARS])
        if self._block_list.blocks_text(text):
            return ToolResult(text=BLOCKED, error="blocked", foreign=True)
        return ToolResult(text=text, error=result.error, foreign=True)

    def close(self) -> None:
        getattr(self._tool, "close", lambda: None)()


@contextmanager
def faults_of(name: str) -> Iterator[None]:
    """Turn any exception into a ToolUnavailableError of this tool, without secrets."""
    try:
        yield
    except ToolUnavailableError as error:
        raise ToolUnavailableError(without_secrets(str(error))) from None
    except Exception as error:
        raise ToolUnavailableError(f"{name} failed with {raised(error)}") from None


def raised(error: BaseException) -> str:
    """Return the type of an error and its location, without the message: it may contain a key or page text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {os.path.basename(frame.filename)}, line {frame.lineno}"
