"""The switched-on tools as an MCP server over stdio, for one client."""

from collections.abc import Sequence
from typing import Annotated

from fastmcp import FastMCP
from fastmcp.tools.base import ToolResult as McpResult
from mcp.types import TextContent
from pydantic import Field

from configs.errors import UserError, whole_letters
from envs.tools.mcp import UNAVAILABLE
from envs.tools.toolbox import AnswerTool, ThinkTool, Toolbox
from envs.types import Tool, ToolResult, ToolUnavailableError

MAX_INPUT_CHARS = 100_000


def build_server(tools: Sequence[Tool]) -> FastMCP:
    """Return a FastMCP server that offers tools, except the planner's own moves `think` and `answer`.

    Every failure is a result with `isError` and its category in `_meta.error`; the category UNAVAILABLE is a fault that
    the caller's input did not cause.
    """
    server = FastMCP("agentflow-tools")
    for tool in tools:
        if not isinstance(tool, ThinkTool | AnswerTool):
            _offer(server, tool)
    return server


def _offer(server: FastMCP, tool: Tool) -> None:
    async def call(
        input: Annotated[str, Field(max_length=MAX_INPUT_CHARS, description="the input of the tool, as plain text")],
    ) -> McpResult:
        try:
            result = await tool.call(input)
        except (ToolUnavailableError, UserError) as error:
            result = ToolResult(text=f"The tool is unavailable: {error}", error=UNAVAILABLE)
        content = [TextContent(type="text", text=whole_letters(result.text))]
        meta = {"error": result.error} if result.error else None
        return McpResult(content=content, meta=meta, is_error=result.error is not None)

    server.tool(call, name=tool.name, description=tool.description, output_schema=None)


async def serve(toolbox: Toolbox) -> None:
    """Serve one client over stdio, with one interpreter, until it closes the connection or a signal arrives."""
    with toolbox.episode() as tools:
        await build_server(tools).run_stdio_async(show_banner=False, log_level="ERROR")
