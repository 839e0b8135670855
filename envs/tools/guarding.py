"""What stands around every tool that brings text in from outside."""

import asyncio
import os
import traceback

from envs.tools.block_list import BlockList
from envs.types import Tool, ToolResult, ToolUnavailableError

MAX_TEXT_CHARS = 100_000
BLOCKED = "The result is left out: it holds a question of a benchmark."


class GuardedTool:
    """Marks results as foreign, leaves out those with benchmark text, caps their size and the time they take.

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
        # Half a surrogate pair, which JSON can hold, has no UTF-8 and would break whoever writes it down.
        text = result.text[:MAX_TEXT_CHARS].encode(errors="replace").decode()
        if self._block_list.blocks_text(text):
            return ToolResult(text=BLOCKED, error="blocked", foreign=True)
        return ToolResult(text=text, error=result.error, foreign=True)

    async def _call(self, arguments: str) -> ToolResult:
        try:
            async with asyncio.timeout(self._time_limit_s):
                return await self._tool.call(arguments)
        except ToolUnavailableError:
            raise
        except TimeoutError:
            raise ToolUnavailableError(f"{self.name} gave no result within {self._time_limit_s:g} s") from None
        except Exception as error:
            raise ToolUnavailableError(f"{self.name} failed with {type(error).__name__} {_place(error)}") from error


def _place(error: Exception) -> str:
    """Where it was raised. What it says may hold a key or a page, and stays unsaid."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"in {os.path.basename(frame.filename)}, line {frame.lineno}"
