"""MCP servers over HTTP as real processes."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def started(command: list[str]) -> Iterator[str]:
    """Start a process that prints as its first line where it serves, and yield the address."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert line.startswith("serving tools at http://127.0.0.1:"), line
        yield line.split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
