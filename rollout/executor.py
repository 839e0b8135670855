"""The executor: routes a decision to its tool."""

from dataclasses import replace

from envs.types import Tool, ToolCall, ToolResult
from rollout.decision import Decision


class Executor:
    """Tools by name, for one episode. `think` and `answer` are tools like the others."""

    def __init__(self, tools: list[Tool], max_result_chars: int) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._max_result_chars = max_result_chars

    async def execute(self, decision: Decision) -> tuple[ToolCall, ToolResult]:
        """Run the decision's tool. Raises ToolUnavailableError when the tool itself is broken."""
        call = ToolCall(name=decision.action, arguments=decision.action_input)
        result = await self._tools[call.name].call(call.arguments)
        return call, replace(result, text=cut_middle(result.text.strip(), self._max_result_chars))


def cut_middle(text: str, max_chars: int) -> str:
    """Keep both ends of a long text and say how much is missing between them."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} ...[{len(text) - 2 * half} characters cut]... {text[-half:]}"
