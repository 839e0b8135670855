"""A process that checks answers and is killed if a check hangs or uses too much memory."""

import json
import os
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from configs.errors import UserError

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 120.0
READY = "ready"


class CheckingProcess:
    """Client of `python -m module`, whose `main` calls `serve_checks`. Thread-safe; one question at a time."""

    def __init__(self, module: str, *, limit_s: float) -> None:
        self._module = module
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Mapping[str, object]) -> object:
        """Return the answer; None if the check hung, used too much memory, or crashed. Raise UserError."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                # If it ended between two questions, this question did not cause it.
                self._kill()
                self._start()
            answer = self._exchange(json.dumps(question).encode() + b"\n", self._limit_s)
            if answer is None:
                self._kill()
            return answer

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _start(self) -> None:
        # The environment is empty but for the code's path: no keys, no proxies.
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": os.defpath, "OMP_NUM_THREADS": "1"},
        )
        if self._exchange(b"", START_LIMIT_S) != READY:
            self._kill()
            raise UserError(
                f"`{sys.executable} -m {self._module}` did not start within {START_LIMIT_S:.0f} s; run it by hand"
            )

    def _exchange(self, line: bytes, limit_s: float) -> object:
        """Send a line and return the next line of the process as JSON; None without a whole one in time."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            return None
        # `select.select` accepts no descriptor above 1023.
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        answer = process.stdout.readline() if waiting.poll(1000 * limit_s) else b""
        return json.loads(answer) if answer.endswith(b"\n") else None

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def serve_checks(check: Callable[[Mapping[str, object]], object], *, memory_mb: int = 1024) -> None:
    """Answer one question per line until standard input ends; called by the process's own `main`."""
    limit = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps(READY), flush=True)
    for line in sys.stdin:
        print(json.dumps(check(json.loads(line))), flush=True)
