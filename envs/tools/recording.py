"""Tool results on file, so that two policies meet the same world."""

import fcntl
import json
import os
from pathlib import Path
from typing import Literal

from configs.errors import whole_letters
from envs.tools.keys import ToolSetupError
from envs.types import Tool, ToolResult, ToolUnavailableError

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
            raise ToolSetupError(
                f"there is no recording '{path}' to replay; record one first: envs.recording.mode=record"
            )
        if path.is_dir():
            raise ToolSetupError(f"envs.recording.path = '{path}' is a folder; name a file in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._read_on()
        except OSError as error:
            raise ToolSetupError(f"recording '{path}' cannot be opened: {error.strerror}") from None

    def get(self, key: Key) -> ToolResult | None:
        if key not in self._results and self.mode == "record":
            self._read_on()
        return self._results.get(key)

    def add(self, key: Key, result: ToolResult) -> ToolResult:
        """The result that stands in the file from now on: the first that anybody recorded for this call."""
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
            raise ToolSetupError(
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
