"""The buffer between rollouts and learner: admits groups, keeps those with signal, cuts batches.

It adds waiting to the ledger: who may run a group now, when a batch is full, when training has starved. A dropped
group gives its place back at once; otherwise rollouts would wait for a batch that can never fill.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rollout.admission import Admission, Admitter, BufferSettings, WorkerStatus
from rollout.admission import admission_capacity as admission_capacity
from rollout.casualties import Loss
from rollout.ledger import Ledger
from rollout.lifecycle import GroupCounts, GroupResult, State, TrainedGroups
from rollout.staleness import LEAST_FRESH_SHARE, bias_metrics, fresh_share, oldest_trained_version, version_ages
from rollout.starvation import StarvationGuard, StarvedError

BIAS_WINDOW = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch of one train step: its scored groups as bytes. `version_ages` tells how many train steps the weights of
    each version lie behind; tokens of a version that it lacks are not to be trained on. `untrained` are state, reason
    and bytes of some groups that ended without signal since the batch before, to be looked at; `facts` are added up
    over all groups that ended since then; `warning` says where too few groups carry signal."""

    step: int
    payloads: tuple[bytes, ...]
    untrained: tuple[tuple[State, str, bytes], ...] = ()
    version_ages: Mapping[int, int]
    facts: dict[str, float]
    bias: dict[str, float]
    counts: GroupCounts
    warning: str | None


class BufferClosedError(RuntimeError):
    """The buffer was closed while somebody waited on it."""


class GroupBuffer:
    """Plain asyncio, used from one event loop. `clock` tells the time at which groups end, in seconds."""

    def __init__(
        self,
        settings: BufferSettings,
        ledger: Ledger,
        *,
        policy_version: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._clock = clock
        self._changed = asyncio.Condition()
        self._admitter = Admitter(settings, ledger, policy_version=policy_version)
        self._guard = StarvationGuard(settings.max_empty_batches * settings.batch_groups, ledger.num_without_signal())
        if not ledger.published():
            ledger.publish(policy_version, 0)
        self._look_at_versions()
        self._closed = False

    @property
    def counts(self) -> GroupCounts:
        return self._ledger.counts

    # --- called for workers ----------------------------------------------------------------------

    async def admit(self, status: WorkerStatus, *, patience_s: float = float("inf")) -> Admission:
        """Permits for the capacity there is, at most for the worker's free places.

        Work that the worker does not know of, because the answer to an earlier call was lost, is given out first. A
        worker whose proven version is too old gets nothing. Waits for capacity; woken by a group that ended, a trained
        batch, a newer proven version, or `close`.
        """
        async with self._changed:
            self._admitter.meet(status)
            if not self._closed and (lost := self._admitter.lost(status)):
                return Admission(permits=tuple(lost))
            try:
                async with asyncio.timeout(None if patience_s == float("inf") else patience_s):
                    await self._changed.wait_for(lambda: self._closed or self._admitter.may_work(status))
            except TimeoutError:
                return Admission()
            if self._closed:
                return Admission(closed=True)
            return Admission(permits=tuple(self._admitter.lease(status)))

    async def prove(self, worker: int, policy_version: int) -> None:
        """The worker samples with this version, and it was checked."""
        async with self._changed:
            self._admitter.proven[worker] = policy_version
            self._changed.notify_all()

    def unproven(self, policy_version: int) -> list[int]:
        """The workers that roll out and have not proven this version."""
        return [worker for worker, proven in self._admitter.proven.items() if proven < policy_version]

    async def complete(self, lease: tuple[int, int], result: GroupResult) -> bool:
        """A group came back; True if it will be trained. A second answer to one lease changes nothing. A group with
        fewer than two scored trajectories is tried again, and fails in the end."""
        async with self._changed:
            if lease not in self._admitter.runs:
                return False
            ending = result.ending
            if ending is not None:
                self._ledger.settle(lease, ending, result, now=self._clock())
            elif lease[1] < self._max_attempts(lease):
                self._ledger.give_back(lease, result.reason, max_attempts=self._max_attempts(lease))
            else:
                self._ledger.fail(lease, result, now=self._clock())
            self._admitter.casualties.survived(self._admitter.runs.pop(lease), lease[0])
            self._guard.observe(signal=ending == "ready")
            self._expire_stale()
            self._changed.notify_all()
        return ending == "ready"

    async def release(self, worker: int | None, reason: str) -> Loss:
        """The worker is gone, with None all are: what they ran is queued again. An attempt that ended in the death of a
        worker counts only where the group ran alone."""
        async with self._changed:
            lost = [lease for lease, one in self._admitter.runs.items() if worker in (None, one)]
            if worker is None:
                for lease in lost:
                    self._ledger.run_again(lease)
                loss = Loss(num_groups=len(lost))
            else:
                loss = self._lose(worker, lost, reason)
            self._admitter.part_from(worker)
            self._changed.notify_all()
        return loss

    async def roll_call(self, workers: Collection[int]) -> None:
        """These workers are there. Whoever else has a share of the places or a group is gone: it asked too late."""
        for stranger in self._admitter.known() - set(workers):
            await self.release(stranger, "its worker is gone")

    # --- called for the learner ------------------------------------------------------------------

    async def next_batch(self, step: int) -> Batch | None:
        """The B kept groups with the oldest weights; the same again when it is asked for the same step again.

        Waits until there are B; woken by `complete`. At depth 0 it also waits until nothing runs, so that the batch
        does not depend on who finished first. Fewer than B when signal has become rare, or at the end of the tasks;
        None when there is nothing left. Raises StarvedError, or BufferClosedError after `close`.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._is_cut(step) or self._closed or self._can_cut() or self._starved() or self._ended()
            )
            payloads = self._ledger.batch(step)
            if not payloads:
                if self._closed:
                    raise BufferClosedError("the buffer was closed while the learner waited for a batch")
                if not self._can_cut():
                    if self._ended():
                        return None
                    raise StarvedError(self._diagnosis())
                self._ledger.cut([one.ordinal for one in self._ledger.ready()][: self._settings.batch_groups], step)
                payloads = self._ledger.batch(step)
            return Batch(
                step=step,
                payloads=tuple(payloads),
                untrained=tuple(self._ledger.untrained(step)),
                version_ages=self._version_ages,
                facts=self._ledger.reported(step),
                bias=bias_metrics(self._ledger.durations(BIAS_WINDOW)),
                counts=self._ledger.verify(),
                warning=self._diagnosis() if self._guard.warns else None,
            )

    async def mark_trained(self, step: int, policy_version: int, *, refused: str | None = None) -> None:
        """The step's batch is trained, or refused for the reason given, and its weights are published: its places are
        free, the version moves on, and ready groups that are too stale now are drawn again."""
        async with self._changed:
            self._ledger.mark_trained(step, refused=refused)
            self._guard.begin_batch()
            self._move_on(step, policy_version)

    async def rewind(self, step: int, policy_version: int, trained: TrainedGroups | None = None) -> list[str]:
        """The policy is that of a checkpoint after `step`, published as `policy_version`, and was `trained` on that.
        Returns what the ledger had lost of it, in sentences."""
        async with self._changed:
            mended = self._ledger.follow(trained, step)
            self._ledger.rewind(step)
            self._move_on(step, policy_version)
        return mended

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- rules -----------------------------------------------------------------------------------

    def _max_attempts(self, lease: tuple[int, int]) -> int:
        """Without those that do not count."""
        return self._settings.max_attempts + self._admitter.casualties.excused(lease[0])

    def _lose(self, worker: int, lost: Sequence[tuple[int, int]], reason: str) -> Loss:
        casualties = self._admitter.casualties
        fruitless = casualties.is_fruitless(worker)
        explained = casualties.died(worker, [ordinal for ordinal, _ in lost])
        for lease in lost:
            if self._ledger.give_back(lease, reason, max_attempts=self._max_attempts(lease)) == "failed":
                casualties.forget(lease[0])
                explained = True
        return Loss(num_groups=len(lost), fruitless=fruitless, explained=explained)

    def _is_cut(self, step: int) -> bool:
        """Another call for this step may have cut the batch while this one waited."""
        return self.counts.in_batch > 0 and bool(self._ledger.batch(step))

    def _can_cut(self) -> bool:
        """A batch is full, or what there is must do."""
        counts = self.counts
        in_round = self._settings.pipeline_depth == 0 and counts.running > 0
        if counts.in_batch or not counts.ready or in_round:
            return False
        enough = counts.ready >= self._settings.batch_groups
        return enough or self._guard.relaxes or self._no_more_will_come()

    def _starved(self) -> bool:
        """Not while a group with signal waits for the end of its round."""
        return self._guard.gives_up and not self.counts.ready

    def _ended(self) -> bool:
        return self._no_more_will_come() and self.counts.ready == 0

    def _no_more_will_come(self) -> bool:
        max_tasks, counts = self._settings.max_tasks, self.counts
        return max_tasks is not None and self._ledger.next_task >= max_tasks and not counts.running + counts.queued

    def _diagnosis(self) -> str:
        return self._guard.diagnosis(self.counts, self._ledger.reasons())

    def _look_at_versions(self) -> None:
        published = self._ledger.published()
        self._oldest_version = oldest_trained_version(published, max_staleness=self._settings.max_staleness)
        self._version_ages = version_ages(published, oldest_version=self._oldest_version)

    def _move_on(self, step: int, policy_version: int) -> None:
        self._ledger.publish(policy_version, step)
        self._look_at_versions()
        self._admitter.policy_version = max(policy_version, self._admitter.policy_version)
        self._expire_stale()
        self._changed.notify_all()

    def _expire_stale(self) -> None:
        for group in self._ledger.ready():
            stale = fresh_share(group.versions, fresh=self._version_ages) < LEAST_FRESH_SHARE
            # A task that takes longer than S versions each time is trained on what is left of it in the end.
            if stale and group.attempt < self._settings.max_attempts:
                self._ledger.expire(group, f"older than version {self._oldest_version}")
