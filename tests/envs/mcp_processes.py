"""The tool server as a real process, for the tests of both of its sides."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

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
        return int(self.url.split(":")[2].split("/")[0])

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


def http_server() -> AbstractContextManager[HttpServer]:
    return started([*STDIO_COMMAND, "--transport", "http", "--port", "0"])


@contextmanager
def started(command: list[str]) -> Iterator[HttpServer]:
    """A process that prints, as its first line, where it serves. Started from a terminal or in the background, it
    listens to an interrupt: a shell has its background jobs, and their children, ignore it."""
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
