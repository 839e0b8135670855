"""A ledger on a network file system: one process has it for itself, and shares no memory with others."""

import os
import shutil
import sqlite3

import pytest
from test_ledger import train

from ray_jobs.viewer import rows as view_rows
from ray_jobs.viewer.rows import LedgerRows
from rollout.store import ledger_file
from rollout.store.disk import FileSystem
from rollout.store.ledger import Ledger
from rollout.store.ledger_file import LedgerError
from rollout.store.lifecycle import GroupCounts


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_file, "file_system_of", lambda path: FileSystem(kind="nfs4", mount=tmp_path))
    monkeypatch.setattr(ledger_file, "LEASE_S", 0.1)
    return tmp_path / "ledger.sqlite"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_it_needs_no_shared_memory(path):
    ledger = Ledger(path)
    train(ledger, 1)
    assert ledger._db.execute("PRAGMA locking_mode").fetchone()[0] == "exclusive"
    assert ledger._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert names_in(path.parent) == ["ledger.sqlite", "ledger.sqlite-wal"]


def test_on_a_disk_of_this_machine_others_read_it_beside_the_store(path, monkeypatch):
    monkeypatch.setattr(ledger_file, "file_system_of", lambda path: FileSystem(kind="ext4", mount=path))
    ledger = Ledger(path)
    train(ledger, 1)
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as reader:
        assert reader.execute("SELECT COUNT(*) FROM groups").fetchone() == (2,)


def test_second_store_is_one_clear_error(path):
    ledger = Ledger(path)
    said = r"cannot open the ledger .*: database is locked; end what else has it open, .* \(this one: nfs4\)"
    with pytest.raises(LedgerError, match=said):
        Ledger(path)
    ledger.close()
    Ledger(path).close()


def test_crash_loses_nothing(path, tmp_path):
    ledger = Ledger(path)
    train(ledger, 1)
    ledger.sync()
    train(ledger, 2)
    (tmp_path / "found").mkdir()
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):
        shutil.copyfile(tmp_path / name, tmp_path / "found" / name)
    assert Ledger(tmp_path / "found" / "ledger.sqlite").verify() == GroupCounts(drawn=4, trained=4)


def test_viewer_reads_a_copy_while_the_store_has_it(path, monkeypatch):
    ledger = Ledger(path)
    train(ledger, 1)
    rows = LedgerRows(path)
    rows.refresh()
    assert [row["state"] for row in rows.rows] == ["trained", "trained"]
    train(ledger, 2)
    rows.refresh()
    assert rows.version == 1, "not at every look"
    monkeypatch.setattr(view_rows, "COPY_EVERY_S", 0.0)
    rows.refresh()
    assert (rows.version, len(rows.rows)) == (2, 4)
    assert ledger.verify() == GroupCounts(drawn=4, trained=4)
    assert names_in(path.parent) == ["ledger.sqlite", "ledger.sqlite-wal"]


def test_ledger_in_a_folder_that_may_not_be_written_to_is_read_from_a_copy(tmp_path, monkeypatch):
    """Regression: SQLite opens no ledger there that was closed in order; the viewer showed no groups."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    train(ledger, 1)
    ledger.close()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    opened = []
    monkeypatch.setattr(view_rows, "_read", lambda path: opened.append(path) or [])
    LedgerRows(tmp_path / "ledger.sqlite").refresh()
    with ledger_file.readable_ledger(tmp_path / "ledger.sqlite") as copy:
        assert Ledger(copy).verify() == GroupCounts(drawn=2, trained=2)
    assert all(path.name == "ledger.sqlite" and path.parent != tmp_path for path in (*opened, copy))
    assert len(opened) == 1


def test_copy_of_a_ledger_whose_wal_file_began_anew_meanwhile_is_not_shown(path, monkeypatch):
    ledger = Ledger(path)
    train(ledger, 1)
    rows, copyfile = LedgerRows(path), shutil.copyfile

    def slow_copy(source, target):
        copyfile(source, target)
        if source == path:
            ledger.sync()
            train(ledger, 2)

    monkeypatch.setattr(shutil, "copyfile", slow_copy)
    rows.refresh()
    assert (rows.version, rows.rows) == (0, [])
    monkeypatch.setattr(shutil, "copyfile", copyfile)
    rows.refresh()
    assert len(rows.rows) == 4
