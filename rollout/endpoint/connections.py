"""Connections of the model endpoint: bounds of their number and of the time in which each must send its requests."""

import asyncio
import logging
import resource
import socket
from typing import TYPE_CHECKING

from uvicorn import Config
from uvicorn.server import ServerState

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HttpProtocol

MAX_CONNECTIONS = 1000
REQUEST_S = 30.0
"""Time from the start of a connection or of a request to the request's last byte."""
CLOSING_S = 5.0
"""Time in which the client of an ended attempt must read its last reply, and after which an idle connection closes."""
RETRY_S = 1.0
_log = logging.getLogger(__name__)


class Connection(HttpProtocol):
    """A connection that is closed if it does not send its request in time."""

    def __init__(self, config: Config, state: ServerState) -> None:
        super().__init__(config=config, server_state=state, app_state={"connection": self})
        self.key: str | None = None
        """The key of the attempt that it belongs to."""
        self.since = self.loop.time()
        """When it opened, or sent its last whole request."""
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """True if no whole request waits for its response."""
        return self.cycle is None or self.cycle.more_body or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def finish(self) -> None:
        """Close the connection after the response that is under way, or later if it is idle.

        Attempts may share a client, which may just be sending another attempt's request.
        """
        if self.is_idle:
            self.loop.call_later(CLOSING_S, self._close_of, self.key)
        else:
            self.cycle.keep_alive = False
            self.loop.call_later(CLOSING_S, self.transport.abort)

    def _close_of(self, key: str | None) -> None:
        if self.is_idle and self.key == key:
            self.transport.close()

    def _watch(self) -> None:
        if not self.is_idle:
            self.since = self.loop.time()
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self.transport.abort)


async def accept(listening: socket.socket, config: Config, state: ServerState) -> None:
    """Accept connections until it is cancelled, and close all of them then.

    At the limit the connection that sent no request for the longest time makes room. asyncio's own loop has no limit,
    and logs a thousand tracebacks a second if the process has no descriptors left.
    """
    loop = asyncio.get_running_loop()
    listening.setblocking(False)
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MAX_CONNECTIONS if descriptors == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, descriptors // 2)
    try:
        while True:
            try:
                opened, _ = await loop.sock_accept(listening)
            except OSError as error:
                _log.warning("the model endpoint cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(RETRY_S)
                continue
            if len(state.connections) >= most:
                idle = [one for one in state.connections if isinstance(one, Connection) and one.is_idle]
                if not idle:
                    opened.close()
                    continue
                min(idle, key=lambda one: one.since).transport.abort()
            await loop.connect_accepted_socket(lambda: Connection(config, state), opened)
    finally:
        listening.close()
        for connection in [*state.connections]:
            connection.shutdown()
