"""A program that acts for one attempt: a process of its own, in a folder of its own, of which nothing is left."""

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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from configs.api_keys import without_secrets
from configs.errors import UserError

INHERITED = ("LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Variables of the worker that a program gets, besides where programs lie. None of them is a secret."""

MAX_READ = 64 * 1024
"""Bytes of the end of what a program prints that are looked at."""
MAX_SAID = 300
ENDING_S = 5.0
_INTERPRETER = re.compile(r"python[0-9.]*|bash|sh|node|ruby|perl")


class ProgramError(UserError):
    """The program cannot be started, or ended without success; the message says why."""


class Program:
    """A command; words of it that are files beside the recipe, or where the command is called, are found there, and are
    `files`."""

    def __init__(self, command: str, code_path: str | None) -> None:
        """Raises ProgramError."""
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ProgramError(f"agent.command: '{command}' is no command: {error}") from None
        places = [Path(code_path)] if code_path else []
        self._words = [_found(word, [*places, Path.cwd()]) for word in words]
        self.files = tuple(Path(word) for word in self._words if Path(word).is_file())
        self._path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        if not words or shutil.which(self._words[0], path=self._path) is None:
            if words and Path(self._words[0]).is_file():
                raise ProgramError(
                    f"agent.command: '{words[0]}' may not be executed; `chmod +x` it, or name what runs it, such as "
                    f"`python {words[0]}`"
                )
            raise ProgramError(f"agent.command: there is no program '{words[0] if words else ''}'")
        script = self._words[1] if len(words) > 1 and _INTERPRETER.fullmatch(Path(words[0]).name) else "-"
        if not script.startswith("-") and not Path(script).is_absolute():
            raise ProgramError(
                f"agent.command: there is no file '{script}', neither beside the recipe nor where the command is called"
            )

    async def run(self, task: Mapping[str, object], variables: Mapping[str, str], *, mark: str) -> str:
        """The last line that it prints, with `task` as JSON on its input and no more than `variables` to know. Whatever
        it started ends with it: its process group, and all that has `mark` in its environment. Raises ProgramError."""
        with tempfile.TemporaryDirectory(prefix="agentflow-attempt-", ignore_cleanup_errors=True) as folder:
            own = Path(folder)
            work = own / "work"
            work.mkdir()
            (own / "task").write_text(json.dumps(dict(task)))
            with (own / "task").open("rb") as stdin, (own / "out").open("wb") as out, (own / "err").open("wb") as err:
                process = await asyncio.create_subprocess_exec(
                    self._words[0],
                    *self._words[1:],
                    stdin=stdin,
                    stdout=out,
                    stderr=err,
                    cwd=work,
                    env=self._environment(work) | dict(variables),
                    start_new_session=True,
                )
            try:
                status = await process.wait()
            finally:
                await asyncio.shield(asyncio.to_thread(end_all, process.pid, mark))
            if status != 0:
                raise ProgramError(f"the agent {_how(status)}{_said(own / 'err')}")
            return _printed(own / "out")

    def _environment(self, work: Path) -> dict[str, str]:
        kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
        return {**kept, "PATH": self._path, "HOME": str(work), "TMPDIR": str(work)}


def end_all(group: int, mark: str) -> None:
    """Kill a process group, and every process that has `mark` in the environment it was started with: a daemon leaves
    its group, but takes that along."""
    deadline = time.monotonic() + ENDING_S
    with_mark = mark.encode()
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    while (found := [*_marked(with_mark)]) and time.monotonic() < deadline:
        for process in found:
            _kill(process, with_mark)
        time.sleep(0.01)


def _marked(mark: bytes) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and _has(int(name), mark):
            yield int(name)


def _has(process: int, mark: bytes) -> bool:
    """False for a process that is over, or somebody else's."""
    try:
        return mark in Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return False


def _kill(process: int, mark: bytes) -> None:
    """Through a handle, for another process may have got the number meanwhile."""
    try:
        handle = os.pidfd_open(process)
    except OSError:
        return
    try:
        if _has(process, mark):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def _found(word: str, places: list[Path]) -> str:
    return next((str((place / word).absolute()) for place in places if (place / word).is_file()), word)


def _how(status: int) -> str:
    if status > 0:
        return f"ended with exit status {status}"
    known = -status in {*signal.Signals}
    return f"was ended by {signal.Signals(-status).name if known else f'signal {-status}'}"


def _printed(path: Path) -> str:
    """The last line of a file that is not empty. Raises ProgramError where its beginning was not read."""
    line, is_whole = _last(path)
    if not is_whole:
        raise ProgramError(
            f"the last line that the agent printed has more than {MAX_READ} bytes; post such an answer to "
            "$OPENAI_BASE_URL/answer"
        )
    return line


def _said(path: Path) -> str:
    line, _ = _last(path)
    return f": {without_secrets(line)[:MAX_SAID]}" if line else ""


def _last(path: Path) -> tuple[str, bool]:
    """The last line of a file that is not empty, or its end, and whether it is all of that line."""
    begin = max(0, path.stat().st_size - MAX_READ - len(b"\n\n"))
    with path.open("rb") as file:
        file.seek(begin)
        # Of bytes, and not of a text, which has further separators.
        lines = file.read().splitlines()
    for place, line in reversed([*enumerate(lines)]):
        if said := line.decode(errors="replace").strip():
            return said, place > 0 or begin == 0
    return "", True
