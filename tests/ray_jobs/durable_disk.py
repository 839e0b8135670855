"""A model of what a disk still holds after a power cut: what was synced for certain, anything else perhaps.

It watches one process. Of every file that is synced it remembers the content, of every folder the names. A cut takes,
at random, what came later: the end of a file or all that is new in it, names in a folder, the end of the ledger's -wal
file. SQLite syncs by itself: its main file counts as synced, which SQLite takes care of before it lets go of the -wal
file, and the -wal file as far as it was when the ledger was synced last, or as it went into the main file already.
"""

import os
import random
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rollout.store.ledger_file import LedgerFile

WAL_HEADER, FRAME_HEADER = 32, 24


class PowerCutError(BaseException):
    """The machine went down here."""


@dataclass(slots=True)
class DurableDisk:
    """Watches the files below `root`; everything is synced at the beginning. `cut_at` counts the moments at which a cut
    may come: just before and after a sync, a new name, and a deletion."""

    root: Path
    into: Path
    """Where the cut leaves what survives."""
    rng: random.Random
    cut_at: int | None = None
    moments: int = 0
    _contents: dict[int, bytes] = field(default_factory=dict)
    _names: dict[int, dict[str, int]] = field(default_factory=dict)
    _held: list[int] = field(default_factory=list)
    _wal: tuple[bytes, int] = (b"", 0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        for folder, _, files in os.walk(self.root):
            self._remember_names(Path(folder))
            for name in files:
                self._remember_content(Path(folder) / name)
                if name.endswith("-wal"):
                    self._wal_synced(Path(folder) / name)
        with (
            mock.patch.object(os, "fsync", self._around(os.fsync, self._fsynced)),
            mock.patch.object(Path, "rename", self._around(Path.rename)),
            mock.patch.object(shutil, "rmtree", self._around(shutil.rmtree)),
            mock.patch.object(LedgerFile, "sync", self._around(LedgerFile.sync, self._ledger_synced)),
        ):
            try:
                yield
            finally:
                for descriptor in self._held:
                    os.close(descriptor)

    def _around(self, call: Any, then: Any = lambda *_: None) -> Any:
        def watched(*arguments: Any, **options: Any) -> Any:
            self._moment()
            result = call(*arguments, **options)
            then(*arguments)
            self._moment()
            return result

        return watched

    def _moment(self) -> None:
        self.moments += 1
        if self.moments == self.cut_at:
            self._leave(self.root, self.into)
            raise PowerCutError

    # --- what was synced -------------------------------------------------------------------------

    def _fsynced(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(self.root):
            (self._remember_names if path.is_dir() else self._remember_content)(path)

    def _remember_content(self, path: Path) -> None:
        self._contents[self._number(path)] = path.read_bytes()

    def _remember_names(self, folder: Path) -> None:
        self._names[self._number(folder)] = {path.name: path.stat().st_ino for path in folder.iterdir()}

    def _number(self, path: Path) -> int:
        """The file's inode, held open, so that no other file gets the number of one that was deleted."""
        self._held.append(os.open(path, os.O_RDONLY))
        return path.stat().st_ino

    def _ledger_synced(self, ledger: LedgerFile) -> None:
        wal = ledger._path and ledger._path.with_name(f"{ledger._path.name}-wal")
        if wal and wal.exists():
            self._wal_synced(wal)

    def _wal_synced(self, wal: Path) -> None:
        data = wal.read_bytes()
        self._wal = (data[16:24], len(data))

    # --- what a cut leaves -----------------------------------------------------------------------

    def _leave(self, folder: Path, into: Path) -> None:
        into.mkdir(parents=True)
        now = {path.name: path.stat().st_ino for path in folder.iterdir()}
        paths = {path.stat().st_ino: path for path in self.root.rglob("*")}
        # A file system keeps the order of its names: all the new ones are there, or none is.
        names = now if self.rng.random() < 0.5 else self._names.get(folder.stat().st_ino, {})
        for name, number in names.items():
            path = paths.get(number)
            if name.startswith("ledger.sqlite"):
                continue
            if path and path.is_dir():
                self._leave(path, into / name)
            elif path or number in self._contents:
                (into / name).write_bytes(self._survivor(path, number))
        if (folder / "ledger.sqlite").exists():
            self._leave_ledger(folder, into)

    def _survivor(self, path: Path | None, number: int) -> bytes:
        """`path` None: the name is gone by now, and whether that reached the disk is open."""
        synced = self._contents.get(number, b"")
        now = path.read_bytes() if path else synced
        if not now.startswith(synced):
            return self.rng.choice((now, synced))
        return now[: self.rng.randint(len(synced), len(now))]

    def _leave_ledger(self, folder: Path, into: Path) -> None:
        shutil.copyfile(folder / "ledger.sqlite", into / "ledger.sqlite")
        wal, shm = folder / "ledger.sqlite-wal", folder / "ledger.sqlite-shm"
        if not (wal.exists() and wal.stat().st_size):
            return
        if not shm.exists():
            # Nobody has opened the ledger since the last cut.
            shutil.copyfile(wal, into / wal.name)
            return
        data, index = wal.read_bytes(), shm.read_bytes()
        page = struct.unpack(">I", data[8:12])[0]
        # SQLite notes how far it goes, syncs the -wal file, and only then writes to the main one.
        (last,), (in_main,) = struct.unpack("=I", index[16:20]), struct.unpack("=I", index[128:132])
        salts, synced = self._wal
        least = max(
            WAL_HEADER + in_main * (FRAME_HEADER + page),
            min(synced, len(data)) if salts == data[16:24] else 0,
        )
        most = max(least, WAL_HEADER + last * (FRAME_HEADER + page))
        (into / wal.name).write_bytes(data[: self.rng.randint(least, most)])
