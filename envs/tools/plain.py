"""The two actions that reach no tool: thinking, and giving the answer."""

from envs.types import ToolResult


class ThinkTool:
    name = "think"
    description = "note a thought"

    async def call(self, arguments: str) -> ToolResult:
        return ToolResult(text="Noted.")


class AnswerTool:
    name = "answer"
    description = "give the final answer"

    async def call(self, arguments: str) -> ToolResult:
        return ToolResult(text=arguments)
