"""The ledger: where every group ever drawn is, on disk, through any crash.

One SQLite file is the single truth about groups: their state, who runs them, what they brought. Every move is one
transaction, so a process may be killed at any moment.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

from rollout.store.ledger_file import LedgerError as LedgerError
from rollout.store.ledger_mending import LedgerMending
from rollout.store.lifecycle import Ending, GroupResult, Lease, Permit, ReadyGroup, State

SHOWN_UNTRAINED = 4
"""Of so many groups without signal per train step the bytes are kept, to be looked at."""

_FILTERED = "'all_right', 'all_wrong', 'overlong'"
_UNTRAINED = f"state IN ({_FILTERED}, 'failed') AND payload IS NOT NULL"
"""As in the index `shown`, word for word."""
_BROUGHT = ("worker", "settled_at", "facts", "payload", "versions", "reported_step")


class Ledger(LedgerMending):
    """All calls are short transactions, made from one thread."""

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
        only: Collection[int] | None = None,
        without: Collection[int] = (),
    ) -> list[Permit]:
        """Give up to `num` groups to a worker: queued ones first, then up to `num_new` new ones of the next tasks. With
        `only` these queued ones and none besides, otherwise none of those in `without`."""
        named = ", ".join(map(str, without if only is None else only))
        which = f"ordinal {'NOT IN' if only is None else 'IN'} ({named})"
        with self._transaction():
            query = f"SELECT * FROM groups WHERE state = 'queued' AND {which} ORDER BY task LIMIT ?"
            ordinals = [row["ordinal"] for row in self._db.execute(query, (num,))]
            num_new = min(num_new, num - len(ordinals)) if only is None else 0
            ordinals += [self._insert(self._next_task, "queued", 1) for _ in range(num_new)]
            self._rounds += 1
            for ordinal in ordinals:
                self._move(ordinal, "queued", "running", worker=worker, min_version=min_version, round=self._rounds)
        return [_permit(self._row(ordinal)) for ordinal in ordinals]

    def leases(self) -> list[tuple[int, Permit]]:
        """Everything that is believed to run, each with the worker that runs it."""
        rows = self._db.execute("SELECT * FROM groups WHERE state = 'running'")
        return [(row["worker"], _permit(row)) for row in rows]

    def settle(self, lease: Lease, ending: Ending, result: GroupResult, *, now: float) -> None:
        """A running group ended; its bytes are kept where it will be trained, and for a few that will not be."""
        with self._transaction():
            self._end(
                lease,
                ending,
                settled_at=self._after_the_last(now),
                duration_s=result.duration_s,
                num_tokens=sum(result.versions.values()),
                versions=json.dumps(dict(result.versions)),
                facts=json.dumps(dict(result.facts)),
                payload=result.payload if ending == "ready" else self._shown(result),
            )

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
        facts, tokens = json.dumps(dict(result.facts)), sum(result.versions.values())
        ended = {
            "settled_at": self._after_the_last(now),
            "duration_s": result.duration_s,
            "num_tokens": tokens,
            "facts": facts,
        }
        ended["payload"] = self._shown(result)
        with self._transaction():
            self._end(lease, "failed", **ended, reason=result.reason)

    # --- training --------------------------------------------------------------------------------

    def ready(self) -> list[ReadyGroup]:
        """The groups that wait for a batch, oldest weights first, then in the order of drawing."""
        rows = self._db.execute("SELECT ordinal, task, attempt, versions FROM groups WHERE state = 'ready'")
        groups = [
            ReadyGroup(
                ordinal=row["ordinal"],
                task=row["task"],
                attempt=row["attempt"],
                versions=_versions(row["versions"]),
            )
            for row in rows
        ]
        return sorted(groups, key=lambda one: (min(one.versions, default=0), one.ordinal))

    def expire(self, group: ReadyGroup, reason: str) -> None:
        """Too stale to train on: its task is drawn again as a new group, which runs before any other task is drawn."""
        with self._transaction():
            self._move(group.ordinal, "ready", "expired", payload=None, reason=reason)
            self._insert(group.task, "queued", group.attempt + 1)

    def cut(self, ordinals: Iterable[int], step: int) -> None:
        """These groups are the batch of this train step; all that ended since the last one is reported with it."""
        with self._transaction():
            for ordinal in ordinals:
                self._move(ordinal, "ready", "in_batch", step=step)
            self._db.execute(
                "UPDATE groups SET reported_step = ? WHERE reported_step IS NULL AND settled_at IS NOT NULL", (step,)
            )

    def batch(self, step: int) -> list[bytes]:
        """The bytes of the batch in training; empty where none was cut for this step."""
        rows = self._db.execute(
            "SELECT payload FROM groups WHERE state = 'in_batch' AND step = ? ORDER BY ordinal", (step,)
        )
        return [row["payload"] for row in rows]

    def is_cut(self, step: int) -> bool:
        """Whether a batch is in training for this step."""
        return bool(self._scalar("SELECT EXISTS (SELECT 1 FROM groups WHERE state = 'in_batch' AND step = ?)", (step,)))

    def untrained(self, step: int) -> list[tuple[State, str, bytes]]:
        """State, reason and bytes of some groups that ended without signal before this step's batch was cut."""
        rows = self._db.execute(
            f"SELECT state, reason, payload FROM groups WHERE reported_step = ? AND {_UNTRAINED} "
            "ORDER BY ordinal LIMIT ?",
            (step, SHOWN_UNTRAINED),
        )
        return [(row["state"], row["reason"] or "", row["payload"]) for row in rows]

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
            query = "SELECT ordinal, state, payload IS NULL FROM groups WHERE step > ?"
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

    def forget(self, step: int) -> None:
        """No checkpoint from before this step is left: the bytes of what ended up to it are not needed."""
        with self._transaction():
            self._db.execute(
                "UPDATE groups SET payload = NULL WHERE state IN ('trained', 'refused') AND step <= ?", (step,)
            )
            self._db.execute(f"UPDATE groups SET payload = NULL WHERE reported_step <= ? AND {_UNTRAINED}", (step,))

    def undo_open_rounds(self) -> None:
        """Play rounds again of which some group has not ended: in a synchronous run the groups of a round are sampled
        together, and only together they come out the same. Call it when nothing runs."""
        open_rounds = "SELECT round FROM groups WHERE state IN ('running', 'queued') AND round > 0"
        undone = f"('ready', {_FILTERED}, 'running')"
        with self._transaction():
            query = f"SELECT ordinal, state FROM groups WHERE round IN ({open_rounds}) AND state IN {undone}"
            for ordinal, state in self._db.execute(query).fetchall():
                self._move(ordinal, state, "queued", **dict.fromkeys(_BROUGHT))

    # --- what it all adds up to ------------------------------------------------------------------

    def reported(self, step: int | None = None) -> dict[str, float]:
        """The facts added up over the groups that ended before this step's batch was cut and after the one before;
        with None over all groups that ever ended."""
        where, values = ("reported_step = ?", (step,)) if step is not None else ("facts IS NOT NULL", ())
        totals: Counter[str] = Counter()
        for row in self._db.execute(f"SELECT facts FROM groups WHERE {where}", values):
            totals.update(json.loads(row["facts"] or "{}"))
        return dict(totals)

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
        """Attempts beyond the first, over all groups."""
        return int(self._scalar("SELECT COALESCE(SUM(attempt - 1), 0) FROM groups"))

    def durations(self, last: int) -> list[tuple[State, float, int]]:
        """(state, seconds, tokens) of the groups that ended last."""
        rows = self._db.execute(
            "SELECT state, duration_s, num_tokens FROM groups WHERE settled_at IS NOT NULL "
            "ORDER BY settled_at DESC LIMIT ?",
            (last,),
        )
        return [(row["state"], row["duration_s"], row["num_tokens"]) for row in rows]

    def trained_tasks(self) -> list[int]:
        """The task number of every trained group, sorted."""
        return sorted(row[0] for row in self._db.execute("SELECT task FROM groups WHERE state = 'trained'"))

    def _after_the_last(self, now: float) -> float:
        """The time at which a group ends, later than all before it: the order must outlive a clock that is set back."""
        latest = self._db.execute("SELECT MAX(settled_at) FROM groups").fetchone()[0]
        return now if latest is None or now >= latest else float(latest) + 1e-6

    def _shown(self, result: GroupResult) -> bytes | None:
        """The bytes of a group that is not trained, while there are not enough of them since the last batch."""
        num = self._scalar(f"SELECT COUNT(*) FROM groups WHERE reported_step IS NULL AND {_UNTRAINED}")
        return result.payload if result.payload and num < SHOWN_UNTRAINED else None

    def _end(self, lease: Lease, after: State, **columns: Any) -> None:
        """The end of this attempt and of no later one."""
        row = self._row(lease[0])
        if row is not None and row["attempt"] != lease[1]:
            raise LedgerError(f"group {lease[0]} is at attempt {row['attempt']}, not {lease[1]}")
        self._move(lease[0], "running", after, worker=None, **columns)


@lru_cache(maxsize=65_536)
def _versions(text: str) -> Mapping[int, int]:
    """A ready group is looked at with every batch and every version; it is parsed once."""
    return {int(version): num for version, num in json.loads(text).items()}


def _permit(row: sqlite3.Row) -> Permit:
    return Permit(
        ordinal=row["ordinal"], task=row["task"], attempt=row["attempt"], min_policy_version=row["min_version"]
    )
