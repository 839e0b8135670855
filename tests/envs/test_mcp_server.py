"""`agentflow serve-tools` with the clients of FastMCP and of the protocol's own Python SDK."""

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from fastmcp import Client
from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_processes import ROOT, STDIO_COMMAND, HttpServer, http_server
from scripted import ScriptedTool

from envs.mcp_server import MAX_SESSIONS, TOKEN_VARIABLE, UNAVAILABLE, build_server
from envs.types import Tool, ToolUnavailableError

_TOOLS = {"search", "code"}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


async def _text(client: Client, tool: str, input: str) -> str:
    result = await client.call_tool(tool, {"input": input}, raise_on_error=False)
    return "\n".join(block.text for block in result.content)


# Clients


async def test_a_client_over_http_gets_the_tools_without_the_planners_moves(server: HttpServer) -> None:
    async with Client(server.url) as client:
        assert {tool.name for tool in await client.list_tools()} == _TOOLS
        assert await _text(client, "code", "6 * 7") == "42\n"
        assert "kg" in await _text(client, "search", "weight of wool locks crate")


async def test_the_sdk_over_stdio_gets_the_same_tools() -> None:
    parameters = StdioServerParameters(command=STDIO_COMMAND[0], args=STDIO_COMMAND[1:], cwd=ROOT)
    async with stdio_client(parameters) as (reader, writer), ClientSession(reader, writer) as session:
        greeting = await session.initialize()
        assert greeting.server_info.name == "agentflow-tools"
        assert {tool.name for tool in (await session.list_tools()).tools} == _TOOLS
        await session.call_tool("code", {"input": "x = 20"})
        result = await session.call_tool("code", {"input": "x + 1"})
        assert (result.content[0].text, result.is_error) == ("21\n", False)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_clients_of_both_protocol_versions_have_separate_sessions(server: HttpServer, mode: str) -> None:
    """A connection of the older version is a session; requests of the newer one are independent."""
    async with Client(server.url, mode=mode) as one, Client(server.url, mode=mode) as other:
        await _text(one, "code", "secret = 1")
        assert "NameError" in await _text(other, "code", "secret")
        kept = await _text(one, "code", "secret")
        assert kept == "1\n" if mode == "legacy" else "NameError" in kept


async def test_a_mistake_of_the_caller_is_a_result_with_its_category(server: HttpServer) -> None:
    async with Client(server.url) as client:
        result = await client.call_tool("code", {"input": "1/0"}, raise_on_error=False)
        assert result.is_error
        assert "ZeroDivisionError" in result.content[0].text
        assert result.meta["error"] == "exception"
        for wrong in (
            {"input": "#" * 100_001},
            {"input": ["6*7"]},
            {},
            {"input": "1", "timeout_s": 1e9},
            {"code": "1"},
        ):
            assert (await client.call_tool("code", wrong, raise_on_error=False)).is_error


# Start, end and access


def test_sigterm_ends_the_server_and_every_process_of_its_sandbox() -> None:
    with http_server() as running:
        processes = psutil.Process(running.process.pid).children(recursive=True)
        assert processes
        assert running.end() == 128 + signal.SIGTERM
        assert psutil.wait_procs(processes, timeout=20)[1] == []


def test_the_stdio_server_ends_with_its_client() -> None:
    process = subprocess.Popen(STDIO_COMMAND, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == b""
    assert process.returncode == 0


def test_it_listens_on_loopback_only(server: HttpServer) -> None:
    (listener,) = [one for one in psutil.Process(server.process.pid).net_connections() if one.status == "LISTEN"]
    assert listener.laddr.ip == "127.0.0.1"


async def _status(server: HttpServer, path: str, *headers: str) -> int:
    """Return the status of a GET request with these header lines."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    lines = [f"GET {path} HTTP/1.1", *headers, "Accept: text/event-stream", "Connection: close", "", ""]
    writer.write("\r\n".join(lines).encode())
    status = (await reader.readline()).split()[1]
    writer.close()
    return int(status)


@pytest.mark.parametrize(("host", "status"), [("evil.example", 421), ("127.0.0.1", 400)])
async def test_a_web_page_cannot_reach_it_by_dns_rebinding(server: HttpServer, host: str, status: int) -> None:
    """A hostile site may point its name at 127.0.0.1; the Host header shows it."""
    assert await _status(server, server.path, f"Host: {host}:{server.port}") == status


async def test_requests_without_the_token_or_of_another_origin_are_refused(server: HttpServer) -> None:
    host = f"Host: 127.0.0.1:{server.port}"
    assert await _status(server, server.path, host, "Origin: http://127.0.0.1:9999") == 403
    assert await _status(server, server.path, host, f"Origin: http://127.0.0.1:{server.port}") == 400
    assert [await _status(server, path, host) for path in ("/mcp", "/mcp?token=", "/mcp?token=other", "/")] == [401] * 4
    assert await _status(server, "/mcp", host, f"Authorization: Bearer {server.token}") == 400
    with pytest.raises(Exception, match="error response"):
        async with Client(server.url.partition("?")[0]) as client:
            await client.list_tools()


async def test_a_token_from_the_environment_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "my-own-token")
    with http_server() as running:
        assert running.url.endswith("/mcp")
        async with Client(running.url, auth="my-own-token") as client:
            assert {tool.name for tool in await client.list_tools()} == _TOOLS


@pytest.mark.parametrize(
    "body",
    [b'{"jsonrpc":"2.0","id":1,"method":"\\ud800","params":{"input":"\\ud800"}}', b"[" * 100_000, b"\x00\xff", b""],
)
async def test_invalid_requests_are_refused_and_the_server_continues(server: HttpServer, body: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = (
        f"POST {server.path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n"
        "Accept: application/json, text/event-stream\r\n\r\n"
    )
    writer.write(head.encode() + body)
    assert (await reader.readline()).split()[1] == b"400"
    writer.close()
    async with Client(server.url) as client:
        assert await _text(client, "code", "6 * 7") == "42\n"


# Sessions


async def test_sessions_are_bounded_and_a_closed_connection_makes_room(server: HttpServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_SESSIONS):
            client = await stack.enter_async_context(Client(server.url, mode="legacy"))
            await _text(client, "search", "wool")
        for mode in ("legacy", "auto"):
            late = await stack.enter_async_context(Client(server.url, mode=mode))
            refused = await late.call_tool("code", {"input": "6 * 7"}, raise_on_error=False)
            assert refused.meta["error"] == UNAVAILABLE
        await client.close()
        assert await _text(late, "code", "6 * 7") == "42\n"


class _ScriptedToolbox:
    num_open = 0

    @contextmanager
    def episode(self) -> Iterator[list[Tool]]:
        self.num_open += 1
        yield [ScriptedTool("code", {"1": ToolUnavailableError("the sandbox failed")})]
        self.num_open -= 1


async def test_a_fault_of_the_tool_differs_from_a_mistake_and_sessions_are_closed_with_the_server() -> None:
    toolbox = _ScriptedToolbox()
    async with Client(build_server(toolbox, transport="stdio")) as client:
        result = await client.call_tool("code", {"input": "1"}, raise_on_error=False)
        assert (result.meta["error"], toolbox.num_open) == (UNAVAILABLE, 1)
    assert toolbox.num_open == 0
