"""`agentflow serve-tools` with the clients of FastMCP and of the protocol's own Python SDK."""

import subprocess
import sys
from pathlib import Path

import psutil
from fastmcp import Client
from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client
from scripted import ScriptedTool

from envs.mcp_server import UNAVAILABLE, build_server
from envs.types import ToolUnavailableError

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "ray_jobs.cli", "serve-tools"]


async def test_a_client_gets_the_tools_without_the_planners_moves_and_keeps_its_interpreter() -> None:
    parameters = StdioServerParameters(command=COMMAND[0], args=COMMAND[1:], cwd=ROOT)
    async with stdio_client(parameters) as (reader, writer), ClientSession(reader, writer) as session:
        greeting = await session.initialize()
        assert greeting.server_info.name == "agentflow-tools"
        assert {tool.name for tool in (await session.list_tools()).tools} == {"search", "code"}
        await session.call_tool("code", {"input": "x = 20"})
        result = await session.call_tool("code", {"input": "x + 1"})
        assert (result.content[0].text, result.is_error) == ("21\n", False)
        assert "kg" in (await session.call_tool("search", {"input": "weight of wool locks crate"})).content[0].text
        failed = await session.call_tool("code", {"input": "1/0"})
        assert (failed.is_error, "ZeroDivisionError" in failed.content[0].text) == (True, True)
        assert failed.meta["error"] == "exception"
        for wrong in ({"input": "#" * 100_001}, {"input": ["6*7"]}, {}, {"input": "1", "timeout_s": 1e9}):
            assert (await session.call_tool("code", wrong)).is_error
        (server,) = [one for one in psutil.Process().children() if COMMAND[-1] in one.cmdline()]
        processes = server.children(recursive=True)
        assert processes
    assert psutil.wait_procs([server, *processes], timeout=20)[1] == []


def test_it_ends_with_its_client() -> None:
    process = subprocess.Popen(COMMAND, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == b""
    assert process.returncode == 0


async def test_a_fault_of_the_tool_differs_from_a_mistake() -> None:
    tool = ScriptedTool("code", {"1": ToolUnavailableError("the sandbox failed")})
    async with Client(build_server([tool])) as client:
        result = await client.call_tool("code", {"input": "1"}, raise_on_error=False)
        assert result.meta["error"] == UNAVAILABLE
