"""The lock on a run's folder: one process works on a run at a time."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rollout.file_system import FileSystem, file_system_of

LEASE_S = 120.0
"""A file server holds the locks of a machine that went down for so long at most: NFSv4 grants leases of 90 s."""
RETRY_S = 2.0


class RunLockError(RuntimeError):
    """The run's folder cannot be locked; the message says who holds it, or why."""


class RunLock:
    """Held from the moment it is made until `release`. The system lets go of it when the process ends, however it
    ends."""

    def __init__(self, folder: Path, tell: Callable[[str], None] = print) -> None:
        """Raises RunLockError when another process has it. On a network file system that may be a machine which is
        gone: there the lock is waited for as long as a file server keeps it, and `tell` hears of it. Raises OSError
        when the folder is not writable."""
        self._file = (folder / ".lock").open("a+")
        try:
            _take(self._file, folder, tell)
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def release(self) -> None:
        self._file.close()


def _take(file: TextIO, folder: Path, tell: Callable[[str], None]) -> None:
    place = file_system_of(folder)
    patience_s = LEASE_S if place.networked else 0.0
    deadline, told = time.monotonic() + patience_s, False
    while not _locked(file, folder, place):
        file.seek(0)
        holder = file.read().strip() or "another process"
        if time.monotonic() >= deadline:
            waited = f" ({patience_s:.0f} s of waiting were not enough)" if patience_s else ""
            raise RunLockError(f"{holder} works on the run in '{folder}'; wait for it, or stop it first{waited}")
        if not told:
            told = True
            tell(
                f"{holder} has the lock of '{folder}'; waiting up to {patience_s:.0f} s, because the file server "
                f"({place.kind}) keeps the locks of a machine that is gone for so long"
            )
        time.sleep(RETRY_S)


def _locked(file: TextIO, folder: Path, place: FileSystem) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some file servers say that a lock is held in this way.
        if error.errno == errno.EACCES:
            return False
        raise RunLockError(
            f"'{folder}' cannot be locked: {error.strerror}; its file system ({place.kind or 'unknown'}) must support "
            "flock: mount it with locks, or set output_dir=... to another one"
        ) from error
    return True
