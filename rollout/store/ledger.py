"""The ledger: where every group ever drawn is, on disk, through any crash.

One SQLite file is the single truth about groups: their state, who runs them, what they brought. Every move is one
transaction, so a process may be killed at any moment.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache

from rollout.store.choice import Draw, DrawOf, Outcome, nobody_chooses
from rollout.store.ledger_file import LedgerError as LedgerError
from rollout.store.ledger_mending import BROUGHT, LedgerMending
from rollout.store.lifecycle import Ending, GroupResult, Lease, Permit, ReadyGroup, State

SHOWN_UNTRAINED = 4
"""Of so many groups without signal per train step the bytes are kept, to be looked at."""

_FILTERED = "'all_right', 'all_wrong', 'overlong'"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBatch:
    """The batch of a train step as it stands in the ledger: bytes of its groups; state, reason and bytes of some that
    ended without signal since the batch before; facts added up over all that ended since then, and their number by
    family; the solve rate of each family's last groups; and of those that ended last, batch or not, state, seconds and
    tokens."""

    payloads: tuple[bytes, ...]
    untrained: tuple[tuple[State, str, bytes], ...]
    facts: dict[str, float]
    families: dict[str, int]
    solved: dict[str, float]
    durations: list[tuple[State, float, int]]


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


class Ledger(LedgerMending, LedgerReading):
    """All calls are short transactions, made from one thread; only those made for `aside` may come from another."""

    def together(self) -> AbstractContextManager[None]:
        """The moves within are one transaction."""
        return self._transaction()

    # --- drawing and running ---------------------------------------------------------------------

    def lease(
        self,
        worker: int,
        num: int,
        *,
        num_new: int,
        min_version: int,
        draw_of: DrawOf = nobody_chooses,
        only: Collection[int] | None = None,
        without: Collection[int] = (),
    ) -> list[Permit]:
        """Give up to `num` groups to a worker: queued ones first, then up to `num_new` new ones of the next tasks. With
        `only` these queued ones and none besides, otherwise none of those in `without`. What a task is gets decided
        once, the first time that it is given out."""
        named = ", ".join(map(str, without if only is None else only))
        which = f"ordinal {'NOT IN' if only is None else 'IN'} ({named})"
        with self._transaction():
            columns = "ordinal, task, family, repeats, attempt"
            query = f"SELECT {columns} FROM groups WHERE state = 'queued' AND {which} ORDER BY task"
            queued = self._db.execute(f"{query} LIMIT {num}").fetchall() if self._counts["queued"] else []
            num_new = min(num_new, num - len(queued)) if only is None else 0
            self._rounds += 1
            run = {"worker": worker, "min_version": min_version, "round": self._rounds}
            groups = []
            for ordinal, task, family, repeats, attempt in queued:
                draw = Draw(family, repeats) if family else draw_of(task)
                self._move(ordinal, "queued", "running", **draw._asdict(), **run)
                groups.append((ordinal, task, draw, attempt))
            for task in range(self._next_task, self._next_task + num_new):
                draw = draw_of(task)
                groups.append((self._insert(task, "running", 1, **draw._asdict(), **run), task, draw, 1))
        return [
            Permit(ordinal=ordinal, task=task, **draw._asdict(), attempt=attempt, min_policy_version=min_version)
            for ordinal, task, draw, attempt in groups
        ]

    def leases(self) -> list[tuple[int, Permit]]:
        """Everything that is believed to run, each with the worker that runs it."""
        rows = self._db.execute("SELECT * FROM groups WHERE state = 'running'")
        return [(row["worker"], _permit(row)) for row in rows]

    def settle(self, lease: Lease, ending: Ending, result: GroupResult, *, now: float) -> None:
        """A running group ended; its bytes are kept where it will be trained, and for a few that will not be."""
        with self._transaction():
            shown = ending != "ready" and self._is_shown(result)
            versions = json.dumps(dict(result.versions))
            self._end_with(lease, ending, result, now=now, shown=shown, versions=versions)
            if shown or ending == "ready":
                self._keep(lease[0], result.payload)

    def give_back(self, lease: Lease, reason: str, *, max_attempts: int) -> State:
        """A running group came to nothing: it is queued again, or failed for good after `max_attempts`."""
        attempt = lease[1]
        state: State = "failed" if attempt >= max_attempts else "queued"
        with self._transaction():
            self._end(lease, state, attempt=attempt + (state == "queued"), reason=reason)
        return state

    def run_again(self, lease: Lease) -> None:
        """The run was cut off: nobody runs this group any more, and that is no fault of the group."""
        with self._transaction():
            self._end(lease, "queued")

    def fail(self, lease: Lease, result: GroupResult, *, now: float) -> None:
        """As `settle`, for a group that failed for good and whose last attempt left numbers behind."""
        with self._transaction():
            shown = self._is_shown(result)
            self._end_with(lease, "failed", result, now=now, shown=shown, reason=result.reason)
            if shown:
                self._keep(lease[0], result.payload)

    # --- training --------------------------------------------------------------------------------

    def ready(self) -> list[ReadyGroup]:
        """The groups that wait for a batch, oldest weights first, then in the order of drawing."""
        rows = self._db.execute(
            "SELECT ordinal, task, family, repeats, attempt, versions FROM groups WHERE state = 'ready'"
        )
        groups = [
            ReadyGroup(
                ordinal=row["ordinal"],
                task=row["task"],
                family=row["family"],
                repeats=row["repeats"],
                attempt=row["attempt"],
                versions=_versions(row["versions"]),
            )
            for row in rows
        ]
        return sorted(groups, key=lambda one: (min(one.versions, default=0), one.ordinal))

    def expire(self, group: ReadyGroup, reason: str) -> None:
        """Too stale to train on: its task is drawn again as a new group, which runs before any other task is drawn."""
        with self._transaction():
            self._move(group.ordinal, "ready", "expired", reason=reason)
            self._drop(group.ordinal)
            again = Draw(group.family, group.repeats)
            self._insert(group.task, "queued", group.attempt + 1, **again._asdict())

    def cut(self, ordinals: Iterable[int], step: int) -> None:
        """These groups are the batch of this train step; all that ended since the last one is reported with it."""
        wanted = list(ordinals)
        with self._transaction():
            chosen = "ordinal IN (SELECT value FROM json_each(?))"
            num = self._move_all("ready", "in_batch", chosen, (json.dumps(wanted),), step=step)
            if num != len(wanted):
                raise LedgerError(f"of the {len(wanted)} groups for step {step}, {num} are ready")
            self._db.execute(
                "UPDATE groups SET reported_step = ? WHERE reported_step IS NULL AND settled_at IS NOT NULL", (step,)
            )

    def read_cut(self, step: int, *, num_durations: int, num_lately: int = 1) -> CutBatch:
        """The batch in training; without payloads where none was cut for this step. Made for `aside`."""
        with self._connection_beside() as db:
            reading = LedgerReading(db)
            db.execute("BEGIN")
            try:
                return CutBatch(
                    payloads=tuple(reading.batch(step)),
                    untrained=tuple(reading.untrained(step)),
                    facts=reading.reported(step),
                    families=reading.families(step),
                    solved=reading.solved(step, num_lately),
                    durations=reading.durations(num_durations),
                )
            finally:
                db.execute("ROLLBACK")

    def is_cut(self, step: int) -> bool:
        """Whether a batch is in training for this step."""
        return bool(self._scalar("SELECT EXISTS (SELECT 1 FROM groups WHERE state = 'in_batch' AND step = ?)", (step,)))

    def mark_trained(self, step: int, *, refused: str | None = None) -> None:
        """The batches up to this step are trained, or refused for the reason given. Their bytes stay until `forget`."""
        state: State = "trained" if refused is None else "refused"
        with self._transaction():
            self._move_all("in_batch", state, "step <= ?", (step,), reason=refused)

    def rewind(self, step: int) -> None:
        """The policy is that of a checkpoint after `step`: batches that it knows are trained, later ones are ready
        again."""
        self.mark_trained(step)
        with self._transaction():
            query = "SELECT ordinal, state, ordinal NOT IN (SELECT ordinal FROM payloads) FROM groups WHERE step > ?"
            for ordinal, state, forgotten in self._db.execute(query, (step,)).fetchall():
                if forgotten:
                    raise LedgerError(
                        f"group {ordinal}, of a step after {step}, is lost: its bytes were forgotten once a checkpoint "
                        "knew it, and that checkpoint is gone; put a newer one back into the run's checkpoints/, or "
                        "begin anew under another name=..."
                    )
                self._move(ordinal, state, "ready", step=None)
            self._db.execute("UPDATE groups SET reported_step = NULL WHERE reported_step > ?", (step,))

    def publish(self, policy_version: int, step: int) -> None:
        """The weights after `step` have this number from now on."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO versions VALUES (?, ?)", (policy_version, step))

    def published(self) -> dict[int, int]:
        """The step after which each version was published."""
        return {row["policy_version"]: row["step"] for row in self._db.execute("SELECT * FROM versions")}

    def forget(self, step: int, *, at_most: int = -1) -> int:
        """No checkpoint from before this step is left: the bytes of what ended up to it are not needed. Deletes those
        of so many groups at most (-1: of all) and returns their number."""
        ended = "state IN ('trained', 'refused') AND step <= ? OR shown AND reported_step <= ?"
        # The table of bytes is the shorter one: CROSS JOIN has SQLite begin with it.
        which = f"SELECT ordinal FROM payloads CROSS JOIN groups USING (ordinal) WHERE {ended} LIMIT ?"
        with self._transaction():
            query = f"DELETE FROM payloads WHERE ordinal IN ({which})"
            return self._db.execute(query, (step, step, at_most)).rowcount

    def undo_open_rounds(self, of: Collection[int] | None = None) -> None:
        """Play rounds again of which some group has not ended, with `of` only the rounds of these groups: in a
        synchronous run the groups of a round are sampled together, and only together they come out the same. Call it
        when none of them runs."""
        named = "" if of is None else f" AND ordinal IN ({', '.join(map(str, of))})"
        open_rounds = f"SELECT round FROM groups WHERE state IN ('running', 'queued') AND round > 0{named}"
        undone = f"('ready', {_FILTERED}, 'running')"
        with self._transaction():
            query = f"SELECT ordinal, state FROM groups WHERE round IN ({open_rounds}) AND state IN {undone}"
            for ordinal, state in self._db.execute(query).fetchall():
                self._move(ordinal, state, "queued", **dict.fromkeys(BROUGHT))
                self._drop(ordinal)

    # --- what it all adds up to ------------------------------------------------------------------

    def reasons(self) -> dict[str, int]:
        """Why groups failed or expired, with how many each."""
        rows = self._db.execute(
            "SELECT reason, COUNT(*) AS num FROM groups WHERE state IN ('failed', 'expired') GROUP BY reason"
        )
        return {row["reason"]: row["num"] for row in rows}

    def num_without_signal(self) -> int:
        """Groups without signal that ended since the last one with it."""
        return self._scalar(
            f"SELECT COUNT(*) FROM groups WHERE state IN ({_FILTERED}, 'failed') AND settled_at > "
            "(SELECT COALESCE(MAX(settled_at), -1) FROM groups "
            "WHERE state IN ('ready', 'in_batch', 'trained', 'refused', 'expired'))"
        )

    def num_requeued(self) -> int:
        """Attempts beyond the first, over all groups. One that expired has its attempts in the group that its task was
        drawn again as, which goes on counting."""
        return int(self._scalar("SELECT COALESCE(SUM(attempt - 1), 0) FROM groups WHERE state != 'expired'"))

    def trained_tasks(self) -> list[int]:
        """The task number of every trained group, sorted."""
        return sorted(row[0] for row in self._db.execute("SELECT task FROM groups WHERE state = 'trained'"))

    def _after_the_last(self, now: float) -> float:
        """The time at which a group ends, later than all before it: the order must outlive a clock that is set back."""
        latest = self._db.execute("SELECT MAX(settled_at) FROM groups").fetchone()[0]
        return now if latest is None or now > latest else float(latest) + 1e-6

    def _is_shown(self, result: GroupResult) -> bool:
        """Whether to keep the bytes of a group that is not trained: not where there are enough since the last batch."""
        num = self._scalar("SELECT COUNT(*) FROM groups WHERE reported_step IS NULL AND shown")
        return bool(result.payload) and num < SHOWN_UNTRAINED

    def _end_with(
        self, lease: Lease, after: State, result: GroupResult, *, now: float, shown: bool, **columns: object
    ) -> None:
        self._end(
            lease,
            after,
            settled_at=self._after_the_last(now),
            duration_s=result.duration_s,
            num_tokens=sum(result.versions.values()),
            num_right=result.right,
            num_scored=result.scored,
            facts=json.dumps(dict(result.facts)),
            shown=shown,
            **columns,
        )

    def _end(self, lease: Lease, after: State, **columns: object) -> None:
        """The end of this attempt and of no later one."""
        self._move(lease[0], "running", after, of_attempt=lease[1], worker=None, **columns)


@lru_cache(maxsize=65_536)
def _versions(text: str) -> Mapping[int, int]:
    """A ready group is looked at with every batch and every version; it is parsed once."""
    return {int(version): num for version, num in json.loads(text).items()}


def _permit(row: sqlite3.Row) -> Permit:
    return Permit(
        ordinal=row["ordinal"],
        task=row["task"],
        family=row["family"],
        repeats=row["repeats"],
        attempt=row["attempt"],
        min_policy_version=row["min_version"],
    )
