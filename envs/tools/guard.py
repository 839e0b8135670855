"""Wrappers around every tool that returns outside text: a block list, a cache, and marks of foreign text."""

import asyncio
import json
import os
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from configs.errors import reason, whole_letters
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
        """Return whether neither the address nor the text is blocked."""
        return not self.blocks_host(_host(url)) and not self.blocks_text(text)

    def blocks_host(self, host: str) -> bool:
        """Return whether the host or a parent domain of it is blocked."""
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
    """Read held-out questions, one per line: plain text, or JSON with the field `question`.

    Raises:
        ValueError: If the file cannot be read or a JSON line has no question.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the questions to block cannot be read from '{path}': {reason(error)}") from None
    questions = []
    for number, line in enumerate(lines, 1):
        try:
            questions.append(str(json.loads(line)["question"]) if line.startswith("{") else line)
        except (ValueError, KeyError):
            raise ValueError(f"line {number} of '{path}' is not a JSON object with the field 'question'") from None
    return [question for question in questions if question.strip()]


class CachedTool:
    """A cache in front of a tool. Equal calls share one answer for `max_age_s`, and one request while it is running.

    Failures are not cached. Above `max_entries` the least recently used answer is dropped.
    """

    def __init__(self, tool: Tool, *, max_entries: int, max_age_s: float) -> None:
        self.name = tool.name
        self.description = tool.description
        self._tool = tool
        self._max_entries = max_entries
        self._max_age_s = max_age_s
        self._entries: OrderedDict[str, tuple[asyncio.Task[ToolResult], float]] = OrderedDict()

    async def call(self, arguments: str) -> ToolResult:
        key = arguments.strip()
        task, expires = self._entries.get(key, (None, 0.0))
        if task is None or expires <= time.monotonic():
            task = asyncio.ensure_future(self._tool.call(key))
            task.add_done_callback(lambda done: self._drop_failure(key, done))
            self._entries[key] = task, time.monotonic() + self._max_age_s
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        # Shielded, so that a caller that gives up does not cancel the request of the others.
        return await asyncio.shield(task)

    def _drop_failure(self, key: str, done: asyncio.Task[ToolResult]) -> None:
        failed = done.cancelled() or done.exception() is not None or done.result().error is not None
        if failed and self._entries.get(key, (None, 0.0))[0] is done:
            del self._entries[key]


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
        text = whole_letters(result.text[:MAX_TEXT_CHARS])
        if self._block_list.blocks_text(text):
            return ToolResult(text=BLOCKED, error="blocked", foreign=True)
        return ToolResult(text=text, error=result.error, foreign=True)


@contextmanager
def faults_of(name: str) -> Iterator[None]:
    """Turn any exception into a ToolUnavailableError of this tool."""
    try:
        yield
    except ToolUnavailableError:
        raise
    except Exception as error:
        raise ToolUnavailableError(f"{name} failed with {raised(error)}") from error


def raised(error: BaseException) -> str:
    """Return the type of an error and its location. The message is omitted: it may contain a key or page text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {os.path.basename(frame.filename)}, line {frame.lineno}"
