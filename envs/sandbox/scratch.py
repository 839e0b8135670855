"""Files of the episodes where there is no mount namespace: one private folder each, counted and removed."""

import contextlib
import math
import os
import secrets
import tempfile
import time
from pathlib import Path

_MIB = 1 << 20
_ENTRY_BYTES = 4096
_REMOVAL_PATIENCE_S = 5.0


def scratch_parent() -> Path:
    """The system's temporary folder, unless it is one of Ray's, whose own files lie there."""
    usual = Path(tempfile.gettempdir())
    is_rays = any(os.path.lexists(folder / "session_latest") for folder in (usual, *usual.parents))
    return Path("/tmp") if is_rays else usual


def make_scratch(parent: str) -> str:
    """A new folder that only this user may enter, for all episodes of one sandbox."""
    return tempfile.mkdtemp(prefix="agentflow-sandbox-", dir=parent)


def make_folder(scratch: str) -> str:
    """A new one for one episode, whose name no other can guess."""
    path = os.path.join(scratch, secrets.token_hex(8))
    os.mkdir(path, 0o700)
    return path


def remove_folder(path: str) -> None:
    """With all in it; waits for a dying process that may still add a file."""
    deadline = time.monotonic() + _REMOVAL_PATIENCE_S
    while os.path.isdir(path) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(path)):
                if entry.is_dir(follow_symlinks=False):
                    remove_folder(entry.path)
                else:
                    os.unlink(entry.path)
            os.rmdir(path)


class TmpfsFiles:
    """An episode's files in a file system of its own, which bounds them itself and holds them in memory."""

    check_every_s = math.inf

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_PATH)

    def memory_bytes(self) -> int:
        state = os.fstatvfs(self._descriptor)
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    def over_bound(self) -> bool:
        return False


class FolderFiles:
    """An episode's files in a flat folder of the host's disk. None can be removed or lose its name, so none hides."""

    check_every_s = 0.02

    def __init__(self, path: str, *, max_mb: int, max_files: int) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._max_bytes, self._max_files = max_mb * _MIB, max_files

    def memory_bytes(self) -> int:
        return 0

    def over_bound(self) -> bool:
        """By their lengths, which are never less than what is on the disk."""
        with os.scandir(self._descriptor) as entries:
            sizes = [_ENTRY_BYTES + entry.stat(follow_symlinks=False).st_size for entry in entries]
        return len(sizes) > self._max_files or sum(sizes) > self._max_bytes + _ENTRY_BYTES * len(sizes)
