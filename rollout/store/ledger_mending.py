"""The ledger beside a checkpoint: what becomes durable before one is written, and what it puts right when a ledger has
lost its end."""

import sqlite3
from collections.abc import Callable, Iterable

from rollout.store.ledger_file import LedgerError, LedgerFile
from rollout.store.lifecycle import State, TrainedGroups, TrainedStep, group_id

_IN_A_BATCH = "('in_batch', 'trained', 'refused')"
BROUGHT = ("worker", "settled_at", "num_right", "num_scored", "facts", "shown", "versions", "reported_step")
"""What an attempt brought; a group that is queued again has none of it."""
_NAMED = 8
"""So many groups are named in a message."""


class LedgerMending(LedgerFile):
    """A checkpoint says which groups its weights were trained on. The ledger follows it."""

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
        known = {row["task"] for row in rows.values()} | {task for _, task in listed.values()}
        unknown = [task for task in range(trained.next_task) if task not in known]
        if not (lost or other or unknown):
            return []
        with self._transaction():
            for ordinal in lost:
                self._mark(ordinal, *listed[ordinal])
            for ordinal in other:
                self._undo(ordinal)
            self._count_again()
            for task in unknown:
                self._insert(task, "queued", 1)
        weights = f"the weights of the checkpoint after step {step}"
        return [
            *_told(lost, f"the ledger had lost that {weights} were trained on %s; it stands there again"),
            *_told(
                other, f"the ledger said that {weights} were trained on %s; they were not, and these are open again"
            ),
            *([f"the ledger had lost {len(unknown)} tasks that were drawn; they are drawn again"] if unknown else []),
        ]

    def fail_unreadable(self, is_readable: Callable[[bytes], bool]) -> list[str]:
        """Groups that wait for training and whose bytes a broken disk has changed fail: cut into a batch they would end
        the run, again at each resume. Returns what was done, in sentences."""
        waiting = "state IN ('ready', 'in_batch')"
        query = f"SELECT ordinal, data FROM groups LEFT JOIN payloads USING (ordinal) WHERE {waiting}"
        broken = [ordinal for ordinal, payload in self._db.execute(query) if not is_readable(payload or b"")]
        if broken:
            with self._transaction():
                for ordinal in broken:
                    self._set(ordinal, state="failed", step=None, reason="its bytes changed on disk")
                    self._drop(ordinal)
                self._count_again()
        return _told(broken, "the disk has changed the bytes of %s; they failed and are not trained")

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


def _agrees(row: sqlite3.Row, one: TrainedStep) -> bool:
    state = "trained" if one.refused is None else "refused"
    return row["step"] == one.step and row["state"] in (state, "in_batch")


def _told(ordinals: Iterable[int], sentence: str) -> list[str]:
    names = [group_id(one) for one in sorted(ordinals)]
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [sentence % f"{len(names)} groups ({', '.join(names[:_NAMED])}{more})"]
