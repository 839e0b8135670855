"""A scripted web server on this machine: a function from request to answer."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """`chunks` are sent one by one, `pause_s` apart, until the client hangs up; `body` at once."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    chunks: Iterable[bytes] | None = None
    pause_s: float = 0.0


class LocalServer:
    def __init__(self, answer: Callable[[Request], Answer], *, port: int = 0) -> None:
        self.requests: list[Request] = []
        self.sent = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler(answer))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.host_port = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.host_port}"

    def __enter__(self) -> "LocalServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self, answer: Callable[[Request], Answer]) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def respond(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(self.command, self.path, dict(self.headers), body)
                server.requests.append(request)
                reply = answer(request)
                try:
                    self.send_response(reply.status)
                    for name, value in reply.headers.items():
                        self.send_header(name, value)
                    if reply.chunks is None:
                        self.send_header("Content-Length", str(len(reply.body)))
                    self.end_headers()
                    for chunk in (reply.body,) if reply.chunks is None else reply.chunks:
                        self.wfile.write(chunk)
                        self.wfile.flush()
                        server.sent += len(chunk)
                        time.sleep(reply.pause_s)
                except OSError:
                    # The client closed the connection, as most of these tests expect.
                    self.close_connection = True

            do_GET = do_POST = do_HEAD = respond

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def serving(*answers: Answer) -> LocalServer:
    """Return a server that gives these answers in turn, and then repeats the last one."""
    left = list(answers)
    return LocalServer(lambda request: left.pop(0) if len(left) > 1 else left[0])
