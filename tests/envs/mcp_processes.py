"""The tool server as a real process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

ROOT = Path(__file__).parents[2]
STDIO_COMMAND = [sys.executable, "-m", "ray_jobs.cli", "serve-tools"]


def _with_root() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class HttpServer:
    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def path(self) -> str:
        """The path with the token."""
        parts = urlsplit(self.url)
        return f"{parts.path}?{parts.query}"

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.url).query)["token"][0]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


def http_server() -> AbstractContextManager[HttpServer]:
    return started([*STDIO_COMMAND, "--transport", "http", "--port", "0"])


@contextmanager
def started(command: list[str]) -> Iterator[HttpServer]:
    """Start a process that prints where it serves as its first line.

    It reacts to an interrupt even in a background job, whose children ignore interrupts by default.
    """
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, cwd=ROOT, env=_with_root(), stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        if line.startswith("agentflow: code sandbox"):  # on a machine with the second tier only
            line = process.stderr.readline()
        assert line.startswith("serving tools at http://127.0.0.1:"), line
        yield HttpServer(process, line.split()[-1])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
