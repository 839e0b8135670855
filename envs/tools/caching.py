"""A cache of tool results in memory: siblings of one group ask the same questions, often at the same moment."""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass

from envs.types import Tool, ToolResult


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
