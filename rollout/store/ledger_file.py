"""The ledger's SQLite file: its tables, its moves, and ways to read it beside the writer."""

import asyncio
import json
import os
import shutil
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from configs.errors import UserError
from rollout.store.choice import Outcome
from rollout.store.disk import file_system_of, sync
from rollout.store.lifecycle import LIVE, MOVES, GroupCounts, State


class LedgerMovedOnError(RuntimeError):
    """The ledger changed in a way in which its copy may be half old, half new; copy it again."""


def is_read_from_copy(path: Path) -> bool:
    """On a network file system the store has the ledger for itself, and in a folder that may not be written to SQLite
    opens none that was closed in order."""
    return file_system_of(path).networked or not os.access(path.parent, os.W_OK)


@contextmanager
def readable_ledger(path: Path) -> Iterator[Path]:
    """The ledger's own file, or a copy in this machine's temporary folder, see `is_read_from_copy`. Raises
    LedgerMovedOnError when the -wal file began anew while it was copied."""
    if not is_read_from_copy(path):
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


_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    ordinal INTEGER PRIMARY KEY,
    task INTEGER NOT NULL,
    family TEXT,
    repeats INTEGER,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 1,
    round INTEGER NOT NULL DEFAULT 0,
    worker INTEGER,
    min_version INTEGER,
    step INTEGER,
    reported_step INTEGER,
    settled_at REAL,
    duration_s REAL,
    num_tokens INTEGER,
    versions TEXT,
    num_right REAL,
    num_scored INTEGER,
    facts TEXT,
    shown INTEGER,
    reason TEXT
);
CREATE TABLE IF NOT EXISTS payloads (ordinal INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS states ON groups (state);
CREATE INDEX IF NOT EXISTS endings ON groups (settled_at);
CREATE INDEX IF NOT EXISTS unreported ON groups (reported_step);
CREATE INDEX IF NOT EXISTS steps ON groups (step);
CREATE INDEX IF NOT EXISTS shown ON groups (reported_step) WHERE shown;
CREATE INDEX IF NOT EXISTS outcomes ON groups (family, ordinal) WHERE num_scored > 0;
CREATE TABLE IF NOT EXISTS versions (policy_version INTEGER PRIMARY KEY, step INTEGER NOT NULL);
"""
"""The bytes of a group stand in a table of their own: SQLite writes a row anew whenever one of its columns changes.
Nobody asks for `min_version`, but a ledger with other columns is of another release."""

LARGEST_WAL_PAGES = 2**14
"""64 MiB. A longer -wal file goes into the main one within a commit, which then waits for the disk."""

BUSY_S = 5.0
LEASE_S = 120.0
"""On a network file system the lock of a machine that went down is kept by the server for so long at most."""

_NOT_THE_FILES_FAULT = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PROTOCOL,
}
SHOWN_UNTRAINED = 4
"""Of so many groups without signal per train step the bytes are kept, to be looked at."""

_LIVE = ", ".join(f"'{state}'" for state in LIVE)


class LedgerError(UserError):
    """The ledger was asked for a move that no group may make, or its file does not add up."""


Found = TypeVar("Found")


class LedgerReading:
    """What can be read through any connection to the ledger's file."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def batch(self, step: int) -> list[bytes]:
        """The bytes of the batch in training; empty where none was cut for this step."""
        rows = self._db.execute(
            "SELECT data FROM groups JOIN payloads USING (ordinal) WHERE state = 'in_batch' AND step = ? "
            "ORDER BY ordinal",
            (step,),
        )
        return [row["data"] for row in rows]

    def untrained(self, step: int) -> list[tuple[State, str, bytes]]:
        """State, reason and bytes of some groups that ended without signal before this step's batch was cut."""
        rows = self._db.execute(
            "SELECT state, reason, data FROM groups JOIN payloads USING (ordinal) WHERE reported_step = ? AND shown "
            "ORDER BY ordinal LIMIT ?",
            (step, SHOWN_UNTRAINED),
        )
        return [(row["state"], row["reason"] or "", row["data"]) for row in rows]

    def reported(self, step: int | None = None) -> dict[str, float]:
        """The facts added up over the groups that ended before this step's batch was cut and after the one before;
        with None over all groups that ever ended."""
        where, values = ("reported_step = ?", (step,)) if step is not None else ("facts IS NOT NULL", ())
        totals: Counter[str] = Counter()
        for row in self._db.execute(f"SELECT facts FROM groups WHERE {where}", values):
            totals.update(json.loads(row["facts"] or "{}"))
        return dict(totals)

    def families(self, step: int) -> dict[str, int]:
        """How many groups of each family ended before this step's batch was cut and after the one before."""
        rows = self._db.execute(
            "SELECT family, COUNT(*) AS num FROM groups WHERE reported_step = ? AND family IS NOT NULL GROUP BY family",
            (step,),
        )
        return {row["family"]: row["num"] for row in rows}

    def solved(self, step: int, last: int) -> dict[str, float]:
        """Of each family, the solve rate of the groups that were drawn last: so many of those that ended before this
        step's batch was cut. It takes no longer the more groups there are."""
        rates = {}
        for (family,) in self._db.execute("SELECT DISTINCT family FROM groups WHERE family IS NOT NULL").fetchall():
            row = self._db.execute(
                "SELECT SUM(num_right) / SUM(num_scored) AS rate FROM (SELECT num_right, num_scored FROM groups WHERE "
                "family = ? AND num_scored > 0 AND reported_step <= ? ORDER BY ordinal DESC LIMIT ?)",
                (family, step, last),
            ).fetchone()
            if row["rate"] is not None:
                rates[family] = row["rate"]
        return rates

    def outcomes(self, family: str, last: int) -> list[Outcome]:
        """What came of the family's groups that ended with a scored trajectory: of so many of those that were drawn
        last, newest first. A repeated task has the number of the one that it repeats. It takes no longer the more
        groups there are."""
        rows = self._db.execute(
            "SELECT COALESCE(repeats, task), num_right, num_scored, state NOT IN ('all_right', 'all_wrong', 'failed') "
            "FROM groups WHERE family = ? AND num_scored > 0 ORDER BY ordinal DESC LIMIT ?",
            (family, last),
        )
        return [Outcome(task, right, scored, differed=bool(differed)) for task, right, scored, differed in rows]

    def open_tasks(self) -> set[int]:
        """The numbers of the tasks that groups play or wait to play; of one that is repeated, its first number."""
        rows = self._db.execute("SELECT COALESCE(repeats, task) FROM groups WHERE state IN ('queued', 'running')")
        return {task for (task,) in rows}

    def durations(self, last: int) -> list[tuple[State, float, int]]:
        """(state, seconds, tokens) of the groups that ended last."""
        rows = self._db.execute(
            "SELECT state, duration_s, num_tokens FROM groups WHERE settled_at IS NOT NULL "
            "ORDER BY settled_at DESC LIMIT ?",
            (last,),
        )
        return [(row["state"], row["duration_s"], row["num_tokens"]) for row in rows]


class LedgerFile:
    """The table of groups, the counts kept beside it, and the only two ways to write: a new group, and a move that the
    life of a group allows. `next_task`: the number after the highest that was ever drawn. `path` None keeps it in
    memory. On a network file system one process has it for itself; others read a copy."""

    _counts: Counter[str]
    _next_ordinal: int
    next_task: int
    _rounds: int

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        place = file_system_of(path) if path else None
        shared = place is not None and place.networked
        self._open_to_threads = path is not None and not shared
        self._checkpointing = threading.Lock()
        try:
            self._db = sqlite3.connect(
                path or ":memory:",
                timeout=LEASE_S if shared else BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )
            self._db.row_factory = sqlite3.Row
            if shared:
                # Before the -wal file is touched: SQLite then keeps its index in this process's memory. In a file that
                # is mapped, processes on several machines would not see each other's.
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            # Some systems' SQLite overwrites what is deleted, by default: that is each group's bytes once more.
            self._db.execute("PRAGMA secure_delete = OFF")
            if self._open_to_threads:
                self._db.execute(f"PRAGMA wal_autocheckpoint = {LARGEST_WAL_PAGES}")
            self._refuse_other_columns()
            self._db.executescript(_SCHEMA)
            counted = self._counted()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF in _NOT_THE_FILES_FAULT:
                kind = place.kind if place and place.kind else "unknown"
                raise LedgerError(
                    f"cannot open the ledger {path}: {error}; end what else has it open, free space on its disk, and "
                    f"keep it on a file system with POSIX locks (this one: {kind})"
                ) from error
            raise LedgerError(f"{path} is not a readable ledger: {error}; move it away to begin anew") from error
        if unknown := counted.keys() - MOVES.keys():
            raise LedgerError(f"{path} is of another release: it has groups in states {sorted(unknown)}")
        self._count_again()

    @property
    def counts(self) -> GroupCounts:
        return GroupCounts(drawn=self._counts.total(), **self._counts)

    def verify(self) -> GroupCounts:
        """The counts, after they were compared with the file. Raises LedgerError when they differ."""
        found = GroupCounts(drawn=self._scalar("SELECT COUNT(*) FROM groups"), **self._counted())
        if found != self.counts or not found.balanced:
            raise LedgerError(f"the ledger does not add up: counted {found}, kept {self.counts}")
        return found

    def verify_live(self) -> GroupCounts:
        """As `verify`, of live groups only: it takes no longer the more groups have ended."""
        found = self._counted(f"WHERE state IN ({_LIVE})")
        kept = {state: num for state, num in self._counts.items() if num and state in LIVE}
        if found != kept or not self.counts.balanced:
            raise LedgerError(f"the ledger does not add up: counted {found}, kept {kept}")
        return self.counts

    async def aside(self, look: Callable[[], Found]) -> Found:
        """What this finds, in a thread where one may open the file beside the writer: neither in memory nor on a
        network file system."""
        return await asyncio.to_thread(look) if self._open_to_threads else look()

    def checkpoint(self) -> None:
        """What the -wal file holds goes into the main file, and both are synced. Nobody is waited for who reads or
        writes. Made for `aside`."""
        try:
            with self._checkpointing, self._connection_beside() as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.DatabaseError as error:
            raise self._cannot_write(error) from error

    def sync(self) -> None:
        """All that was written so far survives a power cut, and stands in the main file, unless somebody reads an
        older state at this moment. A commit alone is only appended to the -wal file. Made for `aside`."""
        if self._path and (wal := self._path.with_name(f"{self._path.name}-wal")).exists():
            try:
                sync(wal)
            except OSError as error:
                raise self._cannot_write(error) from error
        self.checkpoint()

    def close(self) -> None:
        with self._checkpointing:
            self._db.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """The moves within are one transaction: all of it or nothing, in the file and in what is kept beside it. One
        within another is part of that."""
        if self._db.in_transaction:
            yield
            return
        kept = self._counts.copy(), self._next_ordinal, self.next_task, self._rounds
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            # A full or broken disk has made SQLite roll back by itself.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._counts, self._next_ordinal, self.next_task, self._rounds = kept
            if isinstance(error, sqlite3.DatabaseError):
                raise self._cannot_write(error) from error
            raise

    @contextmanager
    def _connection_beside(self) -> Iterator[sqlite3.Connection]:
        """For one thread, with a lasting state of the file for each transaction; the writer's own where no other may
        be opened."""
        if not self._open_to_threads:
            yield self._db
            return
        with closing(sqlite3.connect(str(self._path), timeout=BUSY_S, isolation_level=None)) as db:
            db.row_factory = sqlite3.Row
            yield db

    @contextmanager
    def reading(self) -> Iterator[LedgerReading]:
        """One lasting state of the file, for one thread. Made for `aside`."""
        with self._connection_beside() as db:
            db.execute("BEGIN")
            try:
                yield LedgerReading(db)
            finally:
                db.execute("ROLLBACK")

    def _cannot_write(self, error: Exception) -> LedgerError:
        return LedgerError(f"cannot write the ledger {self._path}: {error}; free space on its disk")

    def _refuse_other_columns(self) -> None:
        """Raises LedgerError where the table of groups is there, and is not of this release."""
        with closing(sqlite3.connect(":memory:")) as new:
            new.executescript(_SCHEMA)
            wanted = _columns_of(new)
        if (there := _columns_of(self._db)) and there != wanted:
            differ = ", ".join(sorted(there ^ wanted))
            raise LedgerError(
                f"{self._path} is no ledger of this release: its groups have other columns ({differ}); begin a new "
                "run, or go on with the release that wrote it"
            )

    def _insert(self, task: int, state: State, attempt: int, **columns: object) -> int:
        """A new group. It is drawn and, where it has a worker, runs at once."""
        ordinal = self._next_ordinal
        row = {"ordinal": ordinal, "task": task, "state": state, "attempt": attempt, **columns}
        places = ", ".join("?" * len(row))
        self._db.execute(f"INSERT INTO groups ({', '.join(row)}) VALUES ({places})", tuple(row.values()))
        self._counts[state] += 1
        self._next_ordinal += 1
        self.next_task = max(self.next_task, task + 1)
        return ordinal

    def _move(
        self, ordinal: int, before: State, after: State, *, of_attempt: int | None = None, **columns: object
    ) -> None:
        if after not in MOVES[before]:
            raise LedgerError(f"group {ordinal} may not go from {before} to {after}")
        names = ", ".join(f"{name} = ?" for name in ("state", *columns))
        query = f"UPDATE groups SET {names} WHERE ordinal = ? AND state = ? AND attempt = COALESCE(?, attempt)"
        if self._db.execute(query, (after, *columns.values(), ordinal, before, of_attempt)).rowcount != 1:
            row = self._row(ordinal)
            if row and of_attempt not in (None, row["attempt"]):
                raise LedgerError(f"group {ordinal} is at attempt {row['attempt']}, not {of_attempt}")
            raise LedgerError(f"group {ordinal} is {row['state'] if row else 'unknown'}, not {before}")
        self._counts[before] -= 1
        self._counts[after] += 1

    def _keep(self, ordinal: int, payload: bytes) -> None:
        """The group's bytes."""
        self._db.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?)", (ordinal, payload))

    def _drop(self, ordinal: int) -> None:
        self._db.execute("DELETE FROM payloads WHERE ordinal = ?", (ordinal,))

    def _move_all(self, before: State, after: State, where: str, values: Sequence[object], **columns: object) -> int:
        """Every group in the state `before` for which this holds. Returns their number."""
        if after not in MOVES[before]:
            raise LedgerError(f"no group may go from {before} to {after}")
        names = ", ".join(f"{name} = ?" for name in ("state", *columns))
        query = f"UPDATE groups SET {names} WHERE state = ? AND {where}"
        num = self._db.execute(query, (after, *columns.values(), before, *values)).rowcount
        self._counts[before] -= num
        self._counts[after] += num
        return num

    def _row(self, ordinal: int) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._db.execute("SELECT * FROM groups WHERE ordinal = ?", (ordinal,)).fetchone()
        return row

    def _count_again(self) -> None:
        """What is kept beside the file, taken from the file. Numbers of groups that were lost are not used again."""
        self._counts = Counter(self._counted())
        self._next_ordinal = self._scalar("SELECT COALESCE(MAX(ordinal), -1) FROM groups") + 1
        self.next_task = self._scalar("SELECT COALESCE(MAX(task), -1) FROM groups") + 1
        self._rounds = self._scalar("SELECT COALESCE(MAX(round), 0) FROM groups")

    def _counted(self, where: str = "") -> dict[str, int]:
        rows = self._db.execute(f"SELECT state, COUNT(*) AS num FROM groups {where} GROUP BY state")
        return {row["state"]: row["num"] for row in rows}

    def _scalar(self, query: str, values: Sequence[object] = ()) -> int:
        return int(self._db.execute(query, values).fetchone()[0])


def _columns_of(db: sqlite3.Connection) -> set[str]:
    """Of the table of groups; none where there is no such table yet."""
    return {row[1] for row in db.execute("PRAGMA table_info(groups)")}
