"""Files that are written whole or not at all, files of JSON, and files in memory that end with their process."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import psutil

from configs.errors import UserError
from envs import kernel
from rollout.agent.keeper import REMOVE

TOKENIZER = "tokenizer.json"
"""Copy of the model's tokenizer in a run folder, to read the token ids of its trajectories."""
_PARTIAL = ".partial"
_NETWORK = ("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "sshfs")


def network_file_system(path: Path) -> str | None:
    """Return the kind of network file system, such as nfs4, that a path is on; None for a local disk."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    whole = path.resolve()
    kind = next((mounts[one] for one in (whole, *whole.parents) if one in mounts), "")
    return kind if kind.removeprefix("fuse.") in _NETWORK else None


def sync(path: Path) -> None:
    """Write the content of a file, or the names in a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders; their server keeps names by itself.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path, *, besides: str | None = None) -> None:
    """Sync every file and folder below, except the one named `besides`, then the folder itself."""
    for path in sorted(folder.iterdir()):
        if path.name == besides:
            continue
        if path.is_dir() and not path.is_symlink():
            sync_tree(path)
        elif path.is_file():
            sync(path)
    sync(folder)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file to errors of the operating system: those of a full disk do not name it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file so that a reader sees the old one or the new one, also after a power cut. Raises OSError."""
    partial = path.with_suffix(_PARTIAL)
    with named(path):
        try:
            with partial.open("wb") as file:
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
            sync(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to be filled, which appears as `target`, in place of an earlier one, once all of it is on disk.

    Halves that earlier writers left go away: there is one writer at a time. Raises OSError.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}{_PARTIAL}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep_partials(target.parent, target.name)
        partial.mkdir()
        yield partial
        sync_tree(partial)
        _put(partial, target)
        sync(target.parent)
        sync(target.parent.parent)
    finally:
        remove_tree(partial)


def _put(partial: Path, target: Path) -> None:
    """Move a folder to its place, and an earlier one to `partial`. A killed process leaves one of them."""
    if not target.exists():
        partial.rename(target)
        return
    try:
        kernel.exchange(str(partial), str(target))
    except OSError:
        # Some network file systems cannot. No sweep deletes the folder that is moved aside.
        aside = target.with_name(f".{target.name}.replaced")
        remove_tree(aside)
        target.rename(aside)
        partial.rename(target)
        aside.rename(partial)


def remove_tree(path: Path) -> None:
    """Delete a file, a link or a folder, however deep the folder is. What cannot be deleted stays."""
    if os.path.lexists(path):
        subprocess.run((*REMOVE, path), stderr=subprocess.DEVNULL, check=False)


def sweep_partials(folder: Path, name: str | None = None) -> None:
    """Delete what dead writers left half written in a folder, or of `name`, where no other process writes."""
    for path in folder.glob(f".*.*{_PARTIAL}"):
        if name in (None, path.stem[1:].rpartition(".")[0]):
            remove_tree(path)


def append_record(path: Path, record: Mapping[str, object]) -> None:
    """Append one line of JSON to a file. Raises OSError, which names the file."""
    # Half a surrogate pair, which a model may write, becomes a question mark.
    append_line(path, json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n")


def append_line(path: Path, line: bytes) -> None:
    """Append a line, flushed before this returns, after removing a last line that a crash cut off. Raises OSError."""
    with named(path), path.open("ab+") as file:
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read(size).rfind(b"\n") + 1)
        file.write(line)


def cut_off(path: Path, size: int) -> None:
    """Shorten a file to its first `size` bytes. Raises OSError, which names the file."""
    with named(path):
        if path.stat().st_size > size:
            os.truncate(path, size)
            sync(path)


def read_records(path: Path) -> Iterator[Any]:
    """Yield the records of a file without a last line that a crash cut off. Raises UserError."""
    for number, line in enumerate(whole_lines(path), start=1):
        yield _object_of(line, f"'{path}', line {number},")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError."""
    return _object_of(path.read_bytes(), f"'{path}'")


def _object_of(text: bytes, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{place} is not a JSON object: it was damaged after it was written; restore it from a copy")
    return found


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends, without a last one that a crash cut off."""
    with path.open("rb") as lines:
        yield from (line for line in lines if line.endswith(b"\n"))


def file_digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file in `folder`, by its relative path."""
    return {str(path.relative_to(folder)): file_digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MEMORY = Path("/dev/shm")
_LOCK = ".in-memory"


class MemoryFolder:
    """`path` is this process's own until `close`.

    It lies in memory where `needed` bytes are free there, else on disk. What dead processes left is deleted at the
    start: it takes room that Ray's objects need as well.
    """

    def __init__(self, needed: int = 0) -> None:
        disk = Path(tempfile.gettempdir())
        for place in {MEMORY, disk}:
            sweep(place)
        in_memory = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= needed
        self._home, self._lock = held_folder(MEMORY if in_memory else disk)
        self.path = self._home / "files"
        self.path.mkdir()

    def close(self) -> None:
        self._lock.close()
        remove_tree(self._home)


def held_folder(place: Path) -> tuple[Path, TextIO]:
    """Make a folder that a sweep deletes once the file with it is closed, or this process has ended."""
    # Under a name that no sweep looks at, until it is locked.
    started = Path(tempfile.mkdtemp(prefix=".agentflow-", dir=place))
    # A process id would not do: containers may share memory but not ids.
    lock = (started / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return started.rename(place / started.name.removeprefix(".")), lock


def sweep(place: Path) -> None:
    """Delete the folders whose process has ended."""
    for lock in place.glob(f"agentflow-*/{_LOCK}"):
        with suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(lock.parent)
