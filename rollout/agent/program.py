"""A program that acts for one attempt: a process in a temporary folder, of which nothing remains."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from configs.api_keys import without_secrets
from configs.errors import UserError

INHERITED = ("LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Variables of the worker that a program inherits besides PATH. None of them is a secret."""
MAX_READ = 64 * 1024
"""Bytes that are read from the end of a program's output."""
MAX_ERROR_CHARS = 300
ENDING_S = 5.0
_INTERPRETER = re.compile(r"python[0-9.]*|bash|sh|node|ruby|perl")


class Program:
    """A command. Its words that name files beside the recipe or in the current folder become absolute paths."""

    def __init__(self, command: str, code_path: str | None) -> None:
        """Find the program. Raises UserError."""
        try:
            arguments = shlex.split(command)
        except ValueError as error:
            raise UserError(f"agent.command: '{command}' cannot be parsed: {error}") from None
        places = [*([Path(code_path)] if code_path else []), Path.cwd()]
        self._words = [
            next((str((place / word).absolute()) for place in places if (place / word).is_file()), word)
            for word in arguments
        ]
        self.files = tuple(Path(word) for word in self._words if Path(word).is_file())
        self._path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        if not arguments or shutil.which(self._words[0], path=self._path) is None:
            raise UserError(
                f"agent.command: '{command}' starts with no program that can be executed; name the interpreter of a "
                "script, as in `python agent.py`, or run `chmod +x` on it"
            )
        script = self._words[1] if len(arguments) > 1 and _INTERPRETER.fullmatch(Path(arguments[0]).name) else "-"
        if not script.startswith("-") and not Path(script).is_absolute():
            raise UserError(
                f"agent.command: the file '{script}' is neither beside the recipe nor in the current folder"
            )

    async def run(self, task: Mapping[str, object], variables: Mapping[str, str], *, mark: str) -> str:
        """Run the program with `task` as JSON on its input, and return the last line that it prints.

        Its environment holds `variables` and what is in INHERITED. At the end its process group is killed, and every
        process that has `mark` in its environment. Raises UserError.
        """
        with tempfile.TemporaryDirectory(prefix="agentflow-attempt-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            work = folder / "work"
            work.mkdir()
            (folder / "task").write_text(json.dumps(dict(task)))
            inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
            environment = {**inherited, "PATH": self._path, "HOME": str(work), "TMPDIR": str(work), **variables}
            with (
                (folder / "task").open("rb") as stdin,
                (folder / "out").open("wb") as out,
                (folder / "err").open("wb") as err,
            ):
                process = await asyncio.create_subprocess_exec(
                    *self._words,
                    stdin=stdin,
                    stdout=out,
                    stderr=err,
                    cwd=work,
                    env=environment,
                    start_new_session=True,
                )
            try:
                status = await process.wait()
            finally:
                await asyncio.shield(asyncio.to_thread(end_all, process.pid, mark))
            if status != 0:
                line = without_secrets(_last_line(folder / "err")[0])[:MAX_ERROR_CHARS]
                ending = f"ended with exit status {status}" if status > 0 else f"was ended by signal {-status}"
                raise UserError(f"the agent {ending}{line and f': {line}'}")
            line, is_whole = _last_line(folder / "out")
            if not is_whole:
                raise UserError(
                    f"the last line that the agent printed has more than {MAX_READ} bytes; post such an answer to "
                    "$OPENAI_BASE_URL/answer"
                )
            return line


def end_all(group: int, mark: str) -> None:
    """Kill a process group, and every process with `mark` in its environment.

    A daemon leaves its process group but keeps its environment.
    """
    deadline = time.monotonic() + ENDING_S
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    while time.monotonic() < deadline and (marked := [*filter(lambda one: _has(one, mark), psutil.process_iter())]):
        for process in marked:
            # psutil makes sure that the number still belongs to this process.
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)


def _has(process: psutil.Process, mark: str) -> bool:
    # A process that has ended, or belongs to another user, cannot be read.
    try:
        return mark in str(process.environ())
    except (psutil.Error, OSError):
        return False


def _last_line(path: Path) -> tuple[str, bool]:
    """Return the end of the last line that is not blank, and whether it is the whole line."""
    start = max(0, path.stat().st_size - MAX_READ - len(b"\n\n"))
    with path.open("rb") as file:
        file.seek(start)
        # Texts have more line separators than bytes.
        lines = file.read().splitlines()
    for place, line in reversed([*enumerate(lines)]):
        if text := line.decode(errors="replace").strip():
            return text, place > 0 or start == 0
    return "", True
