"""A ledger read beside the store that writes it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout.file_system import file_system_of


class LedgerMovedOnError(RuntimeError):
    """The ledger changed in a way in which its copy may be half old, half new; copy it again."""


@contextmanager
def readable_ledger(path: Path) -> Iterator[Path]:
    """The ledger's own file; on a network file system, where its store has it for itself, a copy in this machine's
    temporary folder. Raises LedgerMovedOnError when the -wal file began anew while it was copied."""
    if not file_system_of(path).networked:
        yield path
        return
    wal = path.with_name(f"{path.name}-wal")
    with tempfile.TemporaryDirectory(prefix="agentflow-ledger-") as folder:
        copy = Path(folder) / path.name
        before = _generation(wal)
        try:
            shutil.copyfile(path, copy)
            if before:
                shutil.copyfile(wal, copy.with_name(wal.name))
        except FileNotFoundError as error:
            raise LedgerMovedOnError(f"{error.filename} went away while it was copied") from error
        # What goes from the -wal file into the main one meanwhile stays in the -wal file until that begins anew.
        if not _generation(wal) == before == _generation(copy.with_name(wal.name)):
            raise LedgerMovedOnError(f"{path} moved on while it was copied; read it again")
        yield copy


def _generation(wal: Path) -> bytes:
    """The two salts of a -wal file, which change whenever it begins anew; empty where there is none."""
    try:
        with wal.open("rb") as file:
            return file.read(24)[16:]
    except FileNotFoundError:
        return b""
