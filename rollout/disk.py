"""What a power cut leaves: only what was synced, file and folder, is on disk for certain."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PARTIAL = ".partial"


def sync(path: Path) -> None:
    """The content of a file, or the names in a folder, survive a power cut from now on. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders; their server keeps names by itself.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Every file and folder below, then the folder itself. Raises OSError."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            sync_tree(path)
        elif path.is_file():
            sync(path)
    sync(folder)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """What the operating system says of a write names the file: of a full disk it says only that it is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """A reader sees the old file or the new one, also after a power cut. Raises OSError."""
    partial = path.with_suffix(_PARTIAL)
    with named(path):
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
            sync(path.parent)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to be filled, which appears as `target` once all of it is on disk. Halves of it that earlier writers
    left go away: there is one writer at a time. Raises OSError."""
    partial = partial_of(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep_partials(target.parent, target.name)
        partial.mkdir()
        yield partial
        sync_tree(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync(target.parent)
        sync(target.parent.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def partial_of(target: Path) -> Path:
    """What a file or folder is called while it is written."""
    return target.with_name(f".{target.name}.{os.getpid()}{_PARTIAL}")


def sweep_partials(folder: Path, name: str = "*") -> None:
    """Delete what writers that died left half written of `name` in a folder. Call it where no other writes there."""
    for path in folder.glob(f".{name}.*{_PARTIAL}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
