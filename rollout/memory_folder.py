"""A folder in memory that goes with its process: adapters in it are read while others decode."""

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
_LOCK = ".lock"
_NAME = re.compile(r"agentflow-(\d+)-")


class MemoryFolder:
    """`path` is this process's own until `close`. What processes left that did not come to close theirs is deleted
    when the next one begins: it lies in the memory that Ray's objects need as well."""

    def __init__(self) -> None:
        place = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        sweep(place)
        self._home = Path(tempfile.mkdtemp(prefix=f"agentflow-{os.getpid()}-", dir=place))
        # The system lets go of it when the process ends, however it ends.
        self._lock = (self._home / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = self._home / "files"
        self.path.mkdir()

    def close(self) -> None:
        self._lock.close()
        shutil.rmtree(self._home, ignore_errors=True)


def sweep(place: Path) -> None:
    """Delete the folders whose process has ended."""
    for folder in place.glob("agentflow-*"):
        if (named := _NAME.match(folder.name)) and folder.is_dir() and _is_left(folder, int(named[1])):
            shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path, pid: int) -> bool:
    """Whether nobody holds the lock. A number alone proves nothing: containers may share the memory and not the
    numbers."""
    try:
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return not _lives(pid)
    except OSError:
        return False
    return True


def _lives(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
