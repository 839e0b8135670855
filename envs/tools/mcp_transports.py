"""Transports to an MCP server that bound what it may send.

The protocol's own clients read messages of any size.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
from fastmcp.client.transports import ClientTransport, StreamableHttpTransport
from fastmcp.client.transports.base import TransportOptions
from mcp import ClientSession
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

# Its warnings quote servers, and a server may quote the key that it received.
logging.getLogger("mcp.client").setLevel(logging.CRITICAL)

_GRACE_S = 1.0
_HTTP_TIMEOUT_S = 300.0
"""Far above the limit of a call, which applies first."""
_background: set[asyncio.Task[None]] = set()
"""Tasks that close connections; the event loop itself holds tasks only weakly."""


def in_background(closing: Any) -> asyncio.Task[None]:
    """Run a coroutine that closes a connection to its end, also if nothing waits for it."""
    task = asyncio.get_running_loop().create_task(closing)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task


class BoundedStdio(ClientTransport):
    """A command with which it exchanges JSON messages, one per line, over standard input and output.

    A line of more than `max_bytes` ends the connection and is reported in `fault`. The process gets PATH, HOME and the
    like, and `variables`, but no other variable of this process. It is killed with its children at the end.
    """

    def __init__(self, command: Sequence[str], *, variables: Mapping[str, str], max_bytes: int) -> None:
        self._command = tuple(command)
        self._variables = dict(variables)
        self._max_bytes = max_bytes
        self.fault: str | None = None

    @contextlib.asynccontextmanager
    async def connect_session(
        self, *, transport_options: TransportOptions | None = None, **session_kwargs: Any
    ) -> AsyncIterator[ClientSession]:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=get_default_environment() | self._variables,
            limit=self._max_bytes,
            start_new_session=True,
        )
        try:
            arriving, inbox = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            outbox, leaving = anyio.create_memory_object_stream[SessionMessage](0)
            session_class = (transport_options or TransportOptions()).session_class
            async with inbox, outbox, anyio.create_task_group() as pumps:
                pumps.start_soon(self._read, process, arriving)
                pumps.start_soon(_write, process, leaving)
                async with session_class(inbox, outbox, **session_kwargs) as session:
                    yield session
                pumps.cancel_scope.cancel()
        finally:
            # A shield of anyio alone lets asyncio's own `cancel` through, and the process would stay.
            ending = in_background(_end(process))
            with anyio.CancelScope(shield=True):
                await asyncio.shield(ending)

    async def _read(
        self, process: asyncio.subprocess.Process, arriving: "MemoryObjectSendStream[SessionMessage | Exception]"
    ) -> None:
        assert process.stdout is not None
        async with arriving:
            try:
                while line := await process.stdout.readline():
                    message: SessionMessage | Exception
                    try:
                        message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                    except ValueError as error:
                        message = error
                    await arriving.send(message)
            except ValueError:
                self.fault = f"it sent a message of more than {self._max_bytes} bytes"
            except (anyio.BrokenResourceError, ConnectionError):
                pass  # either side closed the connection


async def _write(process: asyncio.subprocess.Process, leaving: "MemoryObjectReceiveStream[SessionMessage]") -> None:
    assert process.stdin is not None
    async with leaving:
        with contextlib.suppress(ConnectionError):
            async for message in leaving:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the input of a process, then kill its process group, also if the event loop ends meanwhile."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await _wait_briefly(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await _wait_briefly(process)


async def _wait_briefly(process: asyncio.subprocess.Process) -> None:
    # asyncio reports the end of a process only after its output is read.
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_S):
            while await process.stdout.read(1 << 16):
                pass
            await process.wait()


class BoundedHttp(StreamableHttpTransport):
    """Streamable HTTP whose uncompressed responses are bounded; a longer one ends and is reported in `fault`.

    `headers` are sent with every request.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str], max_bytes: int) -> None:
        super().__init__(url, headers=dict(headers), httpx_client_factory=self._client)
        self._max_bytes = max_bytes
        self.fault: str | None = None

    def _client(
        self,
        headers: dict[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
        follow_redirects: bool = False,
    ) -> httpx2.AsyncClient:
        # Redirects are left to the session, which follows those within the server's own origin.
        return httpx2.AsyncClient(
            headers=(headers or {}) | {"accept-encoding": "identity"},
            timeout=timeout or httpx2.Timeout(_HTTP_TIMEOUT_S),
            auth=auth,
            # A transport of its own ignores proxies of the environment.
            transport=httpx2.AsyncHTTPTransport(),
            event_hooks={"response": [self._bound]},
        )

    async def _bound(self, response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            self._refuse("it sent a compressed response although only uncompressed ones are accepted")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream, self._max_bytes, self._refuse)

    def _refuse(self, fault: str) -> None:
        self.fault = fault
        raise httpx2.ReadError(fault)


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, max_bytes: int, refuse: Callable[[str], object]) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._refuse = refuse

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in self._stream:
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                self._refuse(f"it sent a response of more than {self._max_bytes} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
