"""The ledger: where every group ever drawn is, on disk, through any crash.

One SQLite file is the single truth about groups: their state, who runs them, what they brought. Every move is one
transaction, so a process may be killed at any moment.
"""

import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache

from rollout.store.choice import Draw, DrawOf, nobody_chooses
from rollout.store.ledger_file import SHOWN_UNTRAINED, LedgerError, LedgerFile, LedgerReading
from rollout.store.lifecycle import (
    LIVE,
    Ending,
    GroupResult,
    Lease,
    Permit,
    State,
    TrainedGroups,
    TrainedStep,
    group_id,
)

_PERMIT = "ordinal, task, family, repeats, attempt"
_FILTERED = "'all_right', 'all_wrong', 'overlong'"
_IN_A_BATCH = "('in_batch', 'trained', 'refused')"
BROUGHT = ("worker", "settled_at", "num_right", "num_scored", "facts", "shown", "versions", "reported_step")
"""What an attempt brought; a group that is queued again has none of it."""
_NAMED = 8
"""So many groups are named in a message."""


class Ledger(LedgerFile, LedgerReading):
    """All calls are short transactions, made from one thread; only those made for `aside` may come from another."""

    # --- drawing and running ---------------------------------------------------------------------

    def lease(
        self,
        worker: int,
        num: int,
        *,
        num_new: int,
        draw_of: DrawOf = nobody_chooses,
        only: Collection[int] | None = None,
        without: Collection[int] = (),
    ) -> list[Permit]:
        """Give up to `num` groups to a worker: queued ones first, then up to `num_new` new ones of the next tasks. With
        `only` these queued ones and none besides, otherwise none of those in `without`. What a task is gets decided
        once, the first time that it is given out."""
        named = ", ".join(map(str, without if only is None else only))
        which = f"ordinal {'NOT IN' if only is None else 'IN'} ({named})"
        with self.together():
            query = f"SELECT {_PERMIT} FROM groups WHERE state = 'queued' AND {which} ORDER BY task"
            queued = self._db.execute(f"{query} LIMIT {num}").fetchall() if self._counts["queued"] else []
            num_new = min(num_new, num - len(queued)) if only is None else 0
            self._rounds += 1
            run = {"worker": worker, "round": self._rounds}
            permits = []
            for ordinal, task, family, repeats, attempt in queued:
                draw = Draw(family, repeats) if family else draw_of(task)
                self._move(ordinal, "queued", "running", **draw._asdict(), **run)
                permits.append(Permit(ordinal=ordinal, task=task, **draw._asdict(), attempt=attempt))
            for task in range(self.next_task, self.next_task + num_new):
                draw = draw_of(task)
                ordinal = self._insert(task, "running", 1, **draw._asdict(), **run)
                permits.append(Permit(ordinal=ordinal, task=task, **draw._asdict(), attempt=1))
        return permits

    def leases(self) -> list[tuple[int, Permit]]:
        """Everything that is believed to run, each with the worker that runs it."""
        rows = self._db.execute(f"SELECT worker, {_PERMIT} FROM groups WHERE state = 'running'")
        return [
            (worker, Permit(ordinal=ordinal, task=task, family=family, repeats=repeats, attempt=attempt))
            for worker, ordinal, task, family, repeats, attempt in rows
        ]

    def settle(self, lease: Lease, ending: Ending | None, result: GroupResult, *, now: float) -> None:
        """A running group ended; with None it failed for good, and its last attempt left numbers behind. Its bytes are
        kept where it will be trained, and for a few that will not be."""
        columns = {"reason": result.reason} if ending is None else {"versions": json.dumps(dict(result.versions))}
        with self.together():
            shown = (
                ending != "ready"
                and bool(result.payload)
                and self._scalar("SELECT COUNT(*) FROM groups WHERE reported_step IS NULL AND shown") < SHOWN_UNTRAINED
            )
            latest = self._db.execute("SELECT MAX(settled_at) FROM groups").fetchone()[0]
            self._end(
                lease,
                ending or "failed",
                # Later than all before it: the order must outlive a clock that is set back.
                settled_at=now if latest is None or now > latest else latest + 1e-6,
                duration_s=result.duration_s,
                num_tokens=sum(result.versions.values()),
                num_right=result.right,
                num_scored=result.scored,
                facts=json.dumps(dict(result.facts)),
                shown=shown,
                **columns,
            )
            if shown or ending == "ready":
                self._keep(lease[0], result.payload)

    def give_back(self, lease: Lease, reason: str, *, max_attempts: int) -> State:
        """A running group came to nothing: it is queued again, or failed for good after `max_attempts`."""
        attempt = lease[1]
        state: State = "failed" if attempt >= max_attempts else "queued"
        with self.together():
            self._end(lease, state, attempt=attempt + (state == "queued"), reason=reason)
        return state

    def run_again(self, lease: Lease) -> None:
        """The run was cut off: nobody runs this group any more, and that is no fault of the group."""
        with self.together():
            self._end(lease, "queued")

    # --- training --------------------------------------------------------------------------------

    def ready(self) -> list[tuple[Lease, Mapping[int, int]]]:
        """The groups that wait for a batch, each with the tokens that each version sampled of it: oldest weights first,
        then in the order of drawing."""
        rows = self._db.execute("SELECT ordinal, attempt, versions FROM groups WHERE state = 'ready'")
        groups = [((row["ordinal"], row["attempt"]), _versions(row["versions"])) for row in rows]
        return sorted(groups, key=lambda group: (min(group[1], default=0), group[0]))

    def expire(self, ordinal: int, reason: str) -> None:
        """Too stale to train on: its task is drawn again as a new group, which runs before any other task is drawn."""
        with self.together():
            self._move(ordinal, "ready", "expired", reason=reason)
            self._drop(ordinal)
            query = "SELECT task, family, repeats, attempt FROM groups WHERE ordinal = ?"
            task, family, repeats, attempt = self._db.execute(query, (ordinal,)).fetchone()
            self._insert(task, "queued", attempt + 1, family=family, repeats=repeats)

    def cut(self, ordinals: Iterable[int], step: int) -> None:
        """These groups are the batch of this train step; all that ended since the last one is reported with it."""
        wanted = list(ordinals)
        with self.together():
            chosen = "ordinal IN (SELECT value FROM json_each(?))"
            num = self._move_all("ready", "in_batch", chosen, (json.dumps(wanted),), step=step)
            if num != len(wanted):
                raise LedgerError(f"of the {len(wanted)} groups for step {step}, {num} are ready")
            self._db.execute(
                "UPDATE groups SET reported_step = ? WHERE reported_step IS NULL AND settled_at IS NOT NULL", (step,)
            )

    def is_cut(self, step: int) -> bool:
        """Whether a batch is in training for this step."""
        return bool(self._scalar("SELECT EXISTS (SELECT 1 FROM groups WHERE state = 'in_batch' AND step = ?)", (step,)))

    def mark_trained(self, step: int, *, refused: str | None = None) -> None:
        """The batches up to this step are trained, or refused for the reason given. Their bytes stay until `forget`."""
        state: State = "trained" if refused is None else "refused"
        with self.together():
            self._move_all("in_batch", state, "step <= ?", (step,), reason=refused)

    def rewind(self, step: int) -> None:
        """The policy is that of a checkpoint after `step`: batches that it knows are trained, later ones are ready
        again. What ended is reported with the step that it was reported with, when that is made again."""
        self.mark_trained(step)
        with self.together():
            query = "SELECT ordinal, state, ordinal NOT IN (SELECT ordinal FROM payloads) FROM groups WHERE step > ?"
            for ordinal, state, forgotten in self._db.execute(query, (step,)).fetchall():
                if forgotten:
                    raise LedgerError(
                        f"group {ordinal}, of a step after {step}, is lost: its bytes were forgotten once a checkpoint "
                        "knew it, and that checkpoint is gone; put a newer one back into the run's checkpoints/, or "
                        "begin anew under another name=..."
                    )
                self._move(ordinal, state, "ready", step=None)

    def publish(self, policy_version: int, step: int) -> None:
        """The weights after `step` have this number from now on."""
        with self.together():
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
        with self.together():
            query = f"DELETE FROM payloads WHERE ordinal IN ({which})"
            return self._db.execute(query, (step, step, at_most)).rowcount

    def undo_open_rounds(self, of: Collection[int] | None = None) -> None:
        """Play rounds again of which some group has not ended, with `of` only the rounds of these groups: in a
        synchronous run the groups of a round are sampled together, and only together they come out the same. Call it
        when none of them runs."""
        named = "" if of is None else f" AND ordinal IN ({', '.join(map(str, of))})"
        open_rounds = f"SELECT round FROM groups WHERE state IN ('running', 'queued') AND round > 0{named}"
        undone = f"('ready', {_FILTERED}, 'running')"
        with self.together():
            query = f"SELECT ordinal, state FROM groups WHERE round IN ({open_rounds}) AND state IN {undone}"
            for ordinal, state in self._db.execute(query).fetchall():
                self._move(ordinal, state, "queued", **dict.fromkeys(BROUGHT))
                self._drop(ordinal)

    # --- beside a checkpoint, which says what its weights were trained on -------------------------

    def trained_groups(self) -> TrainedGroups:
        """Every batch that was cut so far, in the order of steps."""
        steps: dict[int, list[tuple[int, int]]] = {}
        refused: dict[int, str] = {}
        query = f"SELECT step, ordinal, task, state, reason FROM groups WHERE state IN {_IN_A_BATCH} ORDER BY ordinal"
        for step, ordinal, task, state, reason in self._db.execute(query):
            steps.setdefault(step, []).append((ordinal, task))
            if state == "refused":
                refused[step] = reason
        return TrainedGroups(
            next_task=self.next_task,
            steps=tuple(
                TrainedStep(step=step, groups=tuple(steps[step]), refused=refused.get(step)) for step in sorted(steps)
            ),
        )

    def follow(self, trained: TrainedGroups, step: int) -> list[str]:
        """Make the ledger agree with the checkpoint after `step`, whose weights were `trained` on that. Changes nothing
        where no power cut, copy or broken disk has changed the file. Returns what was mended, in sentences. Raises
        LedgerError where it cannot be."""
        rows = {row["ordinal"]: row for row in self._db.execute("SELECT ordinal, task, state, step FROM groups")}
        listed = {ordinal: (one, task) for one in trained.steps for ordinal, task in one.groups}
        for one in listed:
            if one in rows and rows[one]["task"] != listed[one][1]:
                raise LedgerError(
                    f"{self._path} is not the ledger of the checkpoint after step {step}: group {group_id(one)} has "
                    f"task {rows[one]['task']}, and task {listed[one][1]} there; put the run's own ledger back"
                )
        lost = [one for one in listed if not (one in rows and _agrees(rows[one], listed[one][0]))]
        other = [
            one for one, row in rows.items() if row["step"] is not None and row["step"] <= step and one not in listed
        ]
        done = {task for _, task in listed.values()}
        again = [
            one
            for one, row in rows.items()
            if one not in listed and row["task"] in done and (row["state"] in LIVE or one in other)
        ]
        known = {row["task"] for row in rows.values()} | done
        unknown = [task for task in range(trained.next_task) if task not in known]
        if not (lost or other or again or unknown):
            return []
        with self.together():
            for ordinal in lost:
                self._mark(ordinal, *listed[ordinal])
            for ordinal in other:
                self._undo(ordinal)
            for ordinal in again:
                self._set(ordinal, state="expired", step=None, worker=None, reason="trained as another group")
                self._drop(ordinal)
            self._count_again()
            for task in unknown:
                self._insert(task, "queued", 1)
        weights = f"the weights of the checkpoint after step {step}"
        return [
            *_told(lost, f"the ledger had lost that {weights} were trained on %s; it stands there again"),
            *_told(
                other, f"the ledger said that {weights} were trained on %s; they were not, and these are open again"
            ),
            *_told(again, f"the ledger had lost that {weights} were trained on the tasks of %s as other groups"),
            *([f"the ledger had lost {len(unknown)} tasks that were drawn; they are drawn again"] if unknown else []),
        ]

    def fail_unreadable(self, is_readable: Callable[[bytes], bool]) -> list[str]:
        """Groups that wait for training and whose bytes a broken disk has changed fail, and those without signal that
        were kept to be looked at are not shown: either would end the run, again at each resume. Returns what was done,
        in sentences."""
        broken = self._unreadable("state IN ('ready', 'in_batch')", is_readable)
        unshown = self._unreadable("shown AND data IS NOT NULL", is_readable)
        if broken or unshown:
            with self.together():
                for ordinal in broken:
                    self._set(ordinal, state="failed", step=None, reason="its bytes changed on disk")
                    self._drop(ordinal)
                for ordinal in unshown:
                    self._set(ordinal, shown=None)
                    self._drop(ordinal)
                self._count_again()
        return [
            *_told(broken, "the disk has changed the bytes of %s; they failed and are not trained"),
            *_told(unshown, "the disk has changed the bytes of %s, kept to be looked at; they are not shown"),
        ]

    def _unreadable(self, where: str, is_readable: Callable[[bytes], bool]) -> list[int]:
        query = f"SELECT ordinal, data FROM groups LEFT JOIN payloads USING (ordinal) WHERE {where}"
        return [ordinal for ordinal, payload in self._db.execute(query) if not is_readable(payload or b"")]

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

    def _mark(self, ordinal: int, one: TrainedStep, task: int) -> None:
        state: State = "trained" if one.refused is None else "refused"
        self._db.execute(
            "INSERT INTO groups (ordinal, task, state, step, reason) VALUES (?, ?, ?, ?, ?) ON CONFLICT (ordinal) "
            "DO UPDATE SET state = excluded.state, step = excluded.step, reason = excluded.reason, worker = NULL",
            (ordinal, task, state, one.step, one.refused),
        )

    def _undo(self, ordinal: int) -> None:
        """It waits for another batch where its bytes are there, else it runs again."""
        if self._scalar("SELECT EXISTS (SELECT 1 FROM payloads WHERE ordinal = ?)", (ordinal,)):
            self._set(ordinal, state="ready", step=None, reason=None)
        else:
            self._set(ordinal, state="queued", **dict.fromkeys((*BROUGHT, "step", "reason")))

    def _set(self, ordinal: int, **columns: object) -> None:
        names = ", ".join(f"{name} = ?" for name in columns)
        self._db.execute(f"UPDATE groups SET {names} WHERE ordinal = ?", (*columns.values(), ordinal))

    def _end(self, lease: Lease, after: State, **columns: object) -> None:
        """The end of this attempt and of no later one."""
        self._move(lease[0], "running", after, of_attempt=lease[1], worker=None, **columns)


@lru_cache(maxsize=65_536)
def _versions(text: str) -> Mapping[int, int]:
    """A ready group is looked at with every batch and every version; it is parsed once."""
    return {int(version): num for version, num in json.loads(text).items()}


def _agrees(row: sqlite3.Row, one: TrainedStep) -> bool:
    # Of a batch in training the ledger lacks only the end; what it would write as that is `trained`.
    states = ("trained", "in_batch") if one.refused is None else ("refused",)
    return row["step"] == one.step and row["state"] in states


def _told(ordinals: Iterable[int], sentence: str) -> list[str]:
    names = [group_id(one) for one in sorted(ordinals)]
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [sentence % f"{len(names)} groups ({', '.join(names[:_NAMED])}{more})"]
