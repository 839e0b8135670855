"""The buffer between rollouts and learner: admits groups, keeps those with signal, cuts batches.

It adds waiting to the ledger: who may run a group now, when a batch is full, when training has starved. A dropped
group gives its place back at once; otherwise rollouts would wait for a batch that can never fill.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from rollout.filters import ending_of
from rollout.ledger import Ledger
from rollout.lifecycle import GroupCounts, GroupResult, Permit
from rollout.staleness import LEAST_FRESH_SHARE, bias_metrics, fresh_share, oldest_trained_version
from rollout.starvation import StarvationGuard, StarvedError

BIAS_WINDOW = 1000


def admission_capacity(*, pipeline_depth: int, batch_groups: int, outstanding: int) -> int:
    """Groups that may be admitted now: (D + 1) batches, less what is outstanding.

    Outstanding are live groups: queued, running, ready, or in the batch being trained. Counted live and never
    from running totals, which would drift for good after one lost group.
    """
    return max(0, (pipeline_depth + 1) * batch_groups - outstanding)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """batch_groups B, pipeline_depth D, max_staleness S; attempts at one group before it has failed; batches' worth
    of groups without signal before training is given up; tasks to draw at most (None: no end)."""

    batch_groups: int
    pipeline_depth: int
    max_staleness: int = 8
    max_attempts: int = 6
    max_empty_batches: int = 10
    max_tasks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker that asks for work: the version that it has proven, what it runs, and how much more it could."""

    worker: int
    policy_version: int
    running: tuple[tuple[int, int], ...]
    free_places: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The answer: permits, none where there was no work within the worker's patience; `closed`: never again."""

    permits: tuple[Permit, ...] = ()
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch of one train step: its scored groups as bytes. Tokens of versions before `oldest_version` are not to
    be trained on. `facts` are added up over all groups that ended since the batch before; `warning` says where too
    few groups carry signal."""

    step: int
    payloads: tuple[bytes, ...]
    oldest_version: int
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
        self._proven: dict[int, int] = {}
        self._policy_version = policy_version
        self._guard = StarvationGuard(settings.max_empty_batches * settings.batch_groups)
        self._left_in_round = 0
        self._runs = {permit.lease: worker for worker, permit in ledger.leases()}
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
            self._proven[status.worker] = max(status.policy_version, self._proven.get(status.worker, -1))
            if lost := self._lost(status):
                return Admission(permits=tuple(lost))
            try:
                async with asyncio.timeout(None if patience_s == float("inf") else patience_s):
                    await self._changed.wait_for(lambda: self._closed or self._may_work(status))
            except TimeoutError:
                return Admission()
            if self._closed:
                return Admission(closed=True)
            return Admission(permits=tuple(self._lease(status)))

    async def prove(self, worker: int, policy_version: int) -> None:
        """The worker samples with this version, and it was checked."""
        async with self._changed:
            self._proven[worker] = policy_version
            self._changed.notify_all()

    def unproven(self, policy_version: int) -> list[int]:
        """The workers that roll out and have not proven this version."""
        return [worker for worker, proven in self._proven.items() if proven < policy_version]

    async def complete(self, lease: tuple[int, int], result: GroupResult) -> bool:
        """A group came back; True if it will be trained. A second answer to one lease changes nothing. A group with
        fewer than two scored trajectories is tried again, and fails in the end."""
        async with self._changed:
            if self._runs.pop(lease, None) is None:
                return False
            ending = ending_of(result.outcomes)
            if ending is not None:
                self._ledger.settle(lease, ending, result, now=self._clock())
            elif lease[1] < self._settings.max_attempts:
                self._ledger.give_back(lease, result.reason, max_attempts=self._settings.max_attempts)
            else:
                self._ledger.fail(lease, result, now=self._clock())
            self._guard.observe(signal=ending == "ready")
            self._expire_stale()
            self._changed.notify_all()
        return ending == "ready"

    async def release(self, worker: int | None, reason: str) -> int:
        """The worker is gone, with None all are: what they ran is queued again. Returns how many groups that were."""
        async with self._changed:
            lost = [lease for lease, one in self._runs.items() if worker in (None, one)]
            for lease in lost:
                self._ledger.give_back(lease, reason, max_attempts=self._settings.max_attempts)
                del self._runs[lease]
            self._proven = {one: version for one, version in self._proven.items() if worker not in (None, one)}
            self._changed.notify_all()
        return len(lost)

    # --- called for the learner ------------------------------------------------------------------

    async def next_batch(self, step: int) -> Batch | None:
        """The B kept groups with the oldest weights; the same again when it is asked for the same step again.

        Waits until there are B; woken by `complete`. At depth 0 it also waits until nothing runs, so that the batch
        does not depend on who finished first. Fewer than B when signal has become rare, or at the end of the tasks;
        None when there is nothing left. Raises StarvedError, or BufferClosedError after `close`.
        """
        async with self._changed:
            payloads = self._ledger.batch(step)
            if not payloads:
                await self._changed.wait_for(
                    lambda: self._closed or self._can_cut() or self._guard.gives_up or self._ended()
                )
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
                oldest_version=oldest_trained_version(self._policy_version, max_staleness=self._settings.max_staleness),
                facts=self._ledger.reported(step),
                bias=bias_metrics(self._ledger.durations(BIAS_WINDOW)),
                counts=self._ledger.verify(),
                warning=self._diagnosis() if self._guard.warns else None,
            )

    async def mark_trained(self, step: int, policy_version: int) -> None:
        """The step's batch is trained and its weights are published: its places are free, the version moves on, and
        ready groups that are too stale now are drawn again."""
        async with self._changed:
            self._ledger.mark_trained(step)
            self._move_on(policy_version)

    async def rewind(self, step: int, policy_version: int) -> None:
        """The policy is that of a checkpoint after `step`, published as `policy_version`."""
        async with self._changed:
            self._ledger.rewind(step)
            self._move_on(policy_version)

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- rules -----------------------------------------------------------------------------------

    def _may_work(self, status: WorkerStatus) -> bool:
        """Whether there is anything for this worker now. Its proof may be newer than what it said when it asked."""
        proven = self._proven[status.worker] >= self._policy_version - self._settings.pipeline_depth
        return proven and self._num_places(status) > 0 and self._num_available() > 0

    def _lease(self, status: WorkerStatus) -> list[Permit]:
        available = self._num_available()
        permits = self._ledger.lease(
            status.worker,
            min(self._num_places(status), available),
            num_new=max(0, available - self.counts.queued),
            min_version=max(0, self._policy_version - self._settings.pipeline_depth),
        )
        self._left_in_round = available - len(permits)
        self._runs |= {permit.lease: status.worker for permit in permits}
        return permits

    def _lost(self, status: WorkerStatus) -> list[Permit]:
        """What the ledger believes this worker runs, and it does not."""
        mine = {lease for lease, worker in self._runs.items() if worker == status.worker}
        if mine <= set(status.running):
            return []
        return [
            one for worker, one in self._ledger.leases() if worker == status.worker and one.lease not in status.running
        ]

    def _num_running(self, worker: int) -> int:
        return sum(one == worker for one in self._runs.values())

    def _num_places(self, status: WorkerStatus) -> int:
        """Free places, within the worker's share of all that may be live: otherwise who asks first runs everything and
        the others idle. What it runs is counted by the ledger, which knows of what has ended since it asked."""
        live = (self._settings.pipeline_depth + 1) * self._settings.batch_groups
        return min(status.free_places, -(-live // len(self._proven)) - self._num_running(status.worker))

    def _num_available(self) -> int:
        """Groups that may begin: queued ones, and as many new ones as there is capacity for. A synchronous run plays
        round after round; in one that has begun, only what is left of it."""
        if self._settings.pipeline_depth == 0 and self.counts.running:
            return self._left_in_round
        capacity = admission_capacity(
            pipeline_depth=self._settings.pipeline_depth,
            batch_groups=self._settings.batch_groups,
            outstanding=self.counts.outstanding,
        )
        if self._settings.max_tasks is not None:
            capacity = max(0, min(capacity, self._settings.max_tasks - self._ledger.next_task))
        return self.counts.queued + capacity

    def _can_cut(self) -> bool:
        """A batch is full, or what there is must do."""
        counts = self.counts
        in_round = self._settings.pipeline_depth == 0 and counts.running > 0
        if counts.in_batch or not counts.ready or in_round:
            return False
        enough = counts.ready >= self._settings.batch_groups
        return enough or self._guard.relaxes or self._no_more_will_come()

    def _ended(self) -> bool:
        return self._no_more_will_come() and self.counts.ready == 0

    def _no_more_will_come(self) -> bool:
        max_tasks, counts = self._settings.max_tasks, self.counts
        return max_tasks is not None and self._ledger.next_task >= max_tasks and not counts.running + counts.queued

    def _diagnosis(self) -> str:
        return self._guard.diagnosis(self.counts, self._ledger.reasons())

    def _move_on(self, policy_version: int) -> None:
        self._policy_version = policy_version
        self._expire_stale()
        self._changed.notify_all()

    def _expire_stale(self) -> None:
        oldest = oldest_trained_version(self._policy_version, max_staleness=self._settings.max_staleness)
        for group in self._ledger.ready():
            stale = fresh_share(group.versions, oldest_version=oldest) < LEAST_FRESH_SHARE
            # A task that takes longer than S versions each time is trained on what is left of it in the end.
            if stale and group.attempt < self._settings.max_attempts:
                self._ledger.expire(group.ordinal, f"older than version {oldest}")
                self._ledger.queue(group.task, attempt=group.attempt + 1)
