"""What stands around every tool that brings text in from outside: a block list, a cache, marks of foreign text, and a
recording, so that two policies meet the same world."""

import asyncio
import fcntl
import json
import os
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from configs.errors import UserError, reason, unwritable, whole_letters
from envs.leakage import word_grams
from envs.types import Tool, ToolResult, ToolUnavailableError

GRAM_WORDS = 13
"""A text that shares a run of so many words with a held-out question is taken for a copy of it."""
MIN_QUESTION_WORDS = 6
"""A shorter question than GRAM_WORDS is matched whole; one shorter than this is too common a phrase to be matched."""


class BlockList:
    """`hosts` block their subdomains too."""

    def __init__(self, hosts: Sequence[str] = (), questions: Iterable[str] = ()) -> None:
        self.hosts = tuple((_host(f"http://{host.strip('.')}/") or host).lower() for host in hosts)
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
        lines = path.read_text(encoding="utf-8-sig").split("\n")
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


@dataclass(frozen=True, slots=True)
class _Entry:
    result: ToolResult
    expires: float


class CachedTool:
    """Equal calls share one answer for `max_age_s`, and one request while it is under way. Failures are not kept. The
    least recently used of more than `max_entries` answers goes first."""

    def __init__(self, tool: Tool, *, max_entries: int, max_age_s: float) -> None:
        self.name = tool.name
        self.description = tool.description
        self._tool = tool
        self._max_entries = max_entries
        self._max_age_s = max_age_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[ToolResult]] = {}

    async def call(self, arguments: str) -> ToolResult:
        key = arguments.strip()
        entry = self._entries.get(key)
        if entry is not None and entry.expires > time.monotonic():
            self._entries.move_to_end(key)
            return entry.result
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask(key))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        # Shielded: whoever gives up waiting must not take the answer away from the others.
        return await asyncio.shield(task)

    async def _ask(self, key: str) -> ToolResult:
        result = await self._tool.call(key)
        if result.error is None:
            self._entries[key] = _Entry(result, time.monotonic() + self._max_age_s)
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        return result


MAX_TEXT_CHARS = 100_000
BLOCKED = "The result is left out: it holds a question of a benchmark."


class GuardedTool:
    """Asks in whole letters; marks results as foreign, leaves out those with benchmark text, caps their size and the
    time they take.

    Whatever a tool raises but ToolUnavailableError becomes one: a fault of somebody's own tool ends an attempt at a
    task unscored, and no run.
    """

    def __init__(self, tool: Tool, block_list: BlockList, *, time_limit_s: float) -> None:
        self.name = tool.name
        self.description = tool.description
        self._tool = tool
        self._block_list = block_list
        self._time_limit_s = time_limit_s

    async def call(self, arguments: str) -> ToolResult:
        result = await self._call(arguments)
        text = whole_letters(result.text[:MAX_TEXT_CHARS])
        if self._block_list.blocks_text(text):
            return ToolResult(text=BLOCKED, error="blocked", foreign=True)
        return ToolResult(text=text, error=result.error, foreign=True)

    async def _call(self, arguments: str) -> ToolResult:
        with faults_of(self.name):
            try:
                async with asyncio.timeout(self._time_limit_s):
                    result = await self._tool.call(whole_letters(arguments))
            except TimeoutError:
                raise ToolUnavailableError(f"{self.name} gave no result within {self._time_limit_s:g} s") from None
            if not isinstance(result, ToolResult):
                raise ToolUnavailableError(f"{self.name} returned {type(result).__name__}, not a ToolResult")
            return result


@contextmanager
def faults_of(name: str) -> Iterator[None]:
    """Whatever is raised within, but ToolUnavailableError, becomes one of this tool."""
    try:
        yield
    except ToolUnavailableError:
        raise
    except Exception as error:
        raise ToolUnavailableError(f"{name} failed with {raised(error)}") from error


def raised(error: BaseException) -> str:
    """The kind of an error and where it was raised. What it says may hold a key or a page, and stays unsaid."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {os.path.basename(frame.filename)}, line {frame.lineno}"


Mode = Literal["record", "replay"]
Key = tuple[str, str]


class Recording:
    """Results by tool name and arguments in a file of JSON lines, the first one of a call for good.

    Several processes may record into one file; each sees what the others wrote.
    """

    def __init__(self, path: Path, mode: Mode) -> None:
        self.path = path
        self.mode = mode
        self._results: dict[Key, ToolResult] = {}
        self._offset = 0
        if mode == "replay" and not path.is_file():
            raise UserError(
                f"there is no recording '{path}' to replay; record one first: envs.recording.mode=record"
            )
        if path.is_dir():
            raise UserError(f"envs.recording.path = '{path}' is a folder; name a file in it")
        if mode == "record" and (why := unwritable(path.absolute().parent)):
            raise UserError(f"recording '{path}' cannot be written: {why}")
        try:
            self._read_on()
        except OSError as error:
            raise UserError(f"recording '{path}' cannot be opened: {error.strerror}") from None

    def get(self, key: Key) -> ToolResult | None:
        if key not in self._results and self.mode == "record":
            self._read_on()
        return self._results.get(key)

    def add(self, key: Key, result: ToolResult) -> ToolResult:
        """The result that stands in the file from now on: the first that anybody recorded for this call."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._read_on()
            if key not in self._results:
                if file.seek(0, os.SEEK_END) > self._offset:
                    # A crash cut the last line off; ours must not become its end.
                    file.truncate(self._offset)
                file.write(_line(key, result))
        self._read_on()
        return self._results[key]

    def _read_on(self) -> None:
        """Takes up what was written since; a last line without its end is not there yet."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                key, result = self._parsed(line, number)
                self._results.setdefault(key, result)
                self._offset += len(line)

    def _parsed(self, line: bytes, number: int) -> tuple[Key, ToolResult]:
        try:
            row = json.loads(line)
            result = ToolResult(text=row["text"], error=row["error"], foreign=True)
            return (row["tool"], row["arguments"]), result
        except (ValueError, LookupError, TypeError):
            raise UserError(
                f"recording '{self.path}': line {number} after byte {self._offset} is not a recorded result"
            ) from None


class RecordedTool:
    """Answers from a recording. What it lacks is asked and recorded, or in replay is an infrastructure fault, for a
    result that was never recorded would make the two worlds differ.

    For tools that answer a call in the same way whatever came before.
    """

    def __init__(self, tool: Tool, recording: Recording) -> None:
        self.name = tool.name
        self.description = tool.description
        self._tool = tool
        self._recording = recording

    async def call(self, arguments: str) -> ToolResult:
        key = (self.name, whole_letters(arguments.strip()))
        result = self._recording.get(key)
        if result is not None:
            return result
        if self._recording.mode == "replay":
            raise ToolUnavailableError(
                f"'{self._recording.path}' holds no result of {self.name} for {key[1][:80]!r}; record it with "
                "envs.recording.mode=record"
            )
        return self._recording.add(key, await self._tool.call(key[1]))


def _line(key: Key, result: ToolResult) -> bytes:
    row = {"tool": key[0], "arguments": key[1], "text": result.text, "error": result.error}
    return json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n"
