"""The buffer between rollouts and learner: admits groups, keeps those with signal, cuts batches.

It adds waiting to the ledger: who may run a group now, when a batch is full, when training has starved. A dropped
group gives its place back at once; otherwise rollouts would wait for a batch that can never fill.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rollout.filters import StarvationGuard, StarvedError
from rollout.store.admission import Admission, AdmissionQueue, Admitter, BufferSettings, WorkerStatus
from rollout.store.admission import admission_capacity as admission_capacity
from rollout.store.casualties import Loss
from rollout.store.choice import TaskChoice
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupCounts, GroupResult, Lease, State, TrainedGroups
from rollout.store.staleness import LEAST_FRESH_SHARE, bias_metrics, fresh_share, oldest_trained_version, version_ages

BIAS_WINDOW = 1000
LATELY = 8
"""Groups of a family: fewer scatter, more lag behind."""

MOST_TOGETHER = 64
"""Results that are written down before other calls have their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch of one train step: its scored groups as bytes. `version_ages` tells how many train steps the weights of
    each version lie behind; tokens of a version that it lacks are not to be trained on. `untrained` are state, reason
    and bytes of some groups that ended without signal since the batch before, to be looked at; `facts` are added up
    over all groups that ended since then, and `families` says how many of these there were of each family that there
    is; `solved` is the solve rate of each family's last LATELY groups; `warning` says where too few groups carry
    signal."""

    step: int
    payloads: tuple[bytes, ...]
    untrained: tuple[tuple[State, str, bytes], ...] = ()
    version_ages: Mapping[int, int]
    facts: dict[str, float]
    families: Mapping[str, int] = field(default_factory=dict)
    solved: Mapping[str, float] = field(default_factory=dict)
    bias: dict[str, float]
    counts: GroupCounts
    warning: str | None


class BufferClosedError(RuntimeError):
    """The buffer was closed while somebody waited on it."""


class GroupBuffer:
    """Plain asyncio, used from one event loop. `clock` tells the time at which groups end, in seconds. `gather_s`: for
    so long results that come back are gathered, to be written down in one transaction. `choice`: which task a
    new group is of; with None nobody chooses one."""

    def __init__(
        self,
        settings: BufferSettings,
        ledger: Ledger,
        *,
        policy_version: int = 0,
        clock: Callable[[], float] = time.time,
        gather_s: float = 0.0,
        choice: TaskChoice | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._clock = clock
        self._gather_s = gather_s
        self._families = choice.names if choice else ()
        self._came_back: list[_Completion] = []
        self._changed = asyncio.Event()
        self._admitter = Admitter(settings, ledger, policy_version=policy_version, choice=choice)
        self._queue = AdmissionQueue(self._admitter)
        self._guard = self._fresh_guard()
        if not ledger.published():
            ledger.publish(policy_version, 0)
        self._look_at_versions()
        self._closed = False

    @property
    def counts(self) -> GroupCounts:
        return self._ledger.counts

    @property
    def num_workers(self) -> int:
        """Those that roll out."""
        return len(self._admitter.proven)

    # --- called for workers ----------------------------------------------------------------------

    async def admit(self, status: WorkerStatus, *, patience_s: float | None = None) -> Admission:
        """Permits for the capacity there is, at most for the worker's free places and those that become free.

        Work that the worker does not know of, because the answer to an earlier call was lost, is given out first. A
        worker whose proven version is too old gets nothing. Waits for capacity; woken by a group that ended, a trained
        batch, a newer proven version, or `close`.
        """
        if self._closed:
            return Admission(closed=True)
        tried = self._admitter.tries
        self._admitter.meet(status)
        self._pass_suspects_on(tried)
        if lost := self._admitter.lost(status):
            return Admission(permits=tuple(lost))
        waiter = self._queue.join(status)
        try:
            self._queue.serve()
            async with asyncio.timeout(patience_s):
                return await waiter.answer
        except TimeoutError:
            # It may have been given work in the very moment in which its patience ended.
            return Admission() if waiter.answer.cancelled() else waiter.answer.result()
        finally:
            self._queue.leave(waiter)

    async def prove(self, worker: int, policy_version: int) -> None:
        """The worker samples with this version, and it was checked."""
        tried = self._admitter.tries
        self._admitter.proven[worker] = policy_version
        self._pass_suspects_on(tried)
        self._queue.look_again(worker)
        self._queue.serve()

    def unproven(self, policy_version: int) -> list[int]:
        """The workers that roll out and have not proven this version."""
        return [worker for worker, proven in self._admitter.proven.items() if proven < policy_version]

    async def complete(self, lease: Lease, result: GroupResult) -> bool:
        """A group came back; True if it will be trained. A second answer to one lease changes nothing. A group with
        fewer than two scored trajectories is tried again, and fails in the end. Returns once that is written down,
        together with what else comes back within `gather_s`, up to MOST_TOGETHER."""
        completion = _Completion(lease, result, asyncio.get_running_loop().create_future())
        self._came_back.append(completion)
        if len(self._came_back) == 1:
            asyncio.get_running_loop().call_later(self._gather_s, self._write_some)
        return await completion.kept

    async def release(self, worker: int | None, reason: str) -> Loss:
        """The worker is gone, with None all are: what they ran is queued again, and calls of theirs that wait are sent
        away, so that none of them takes work. An attempt that ended in the death of a worker counts only where the
        group ran alone. At depth 0 their rounds are played again as a whole, as if they had not been cut off."""
        self._write_down()
        lost = self._admitter.runs_of(worker)
        with self._ledger.together():
            if worker is None:
                for lease in lost:
                    self._ledger.run_again(lease)
                loss = Loss(num_groups=len(lost))
            else:
                loss = self._lose(worker, lost, reason)
            if self._in_rounds and (lost or worker is None):
                self._ledger.undo_open_rounds(None if worker is None else [ordinal for ordinal, _ in lost])
                self._guard = self._fresh_guard()
        self._queue.send_away(worker, Admission())
        self._admitter.part_from(worker)
        self._queue.look_at_all()
        self._tell()
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
        while not (self._is_cut(step) or self._closed or self._can_cut() or self._starved() or self._ended()):
            await self._changed.wait()
        if not self._is_cut(step):
            if self._closed:
                raise BufferClosedError("the buffer was closed while the learner waited for a batch")
            if not self._can_cut():
                if self._ended():
                    return None
                raise StarvedError(self._diagnosis())
            oldest = self._ledger.ready()[: self._settings.batch_groups]
            self._ledger.cut([ordinal for (ordinal, _), _ in oldest], step)
        return await self._read(step)

    async def mark_trained(self, step: int, policy_version: int, *, refused: str | None = None) -> None:
        """The step's batch is trained, or refused for the reason given, and its weights are published: its places are
        free, the version moves on, and ready groups that are too stale now are drawn again."""
        self._write_down()
        self._ledger.mark_trained(step, refused=refused)
        self._guard.begin_batch()
        self._move_on(step, policy_version)

    async def rewind(self, step: int, policy_version: int, trained: TrainedGroups) -> list[str]:
        """The policy is that of a checkpoint after `step`, published as `policy_version`, and was `trained` on that.
        Returns what the ledger had lost of it, in sentences."""
        self._write_down()
        mended = self._ledger.follow(trained, step)
        # What the ledger believed to run may be what the weights were trained on.
        for lease in self._admitter.runs.keys() - {permit.lease for _, permit in self._ledger.leases()}:
            self._admitter.end(lease)
        self._ledger.rewind(step)
        self._move_on(step, policy_version)
        return mended

    async def close(self) -> None:
        self._write_down()
        self._closed = True
        self._queue.send_away(None, Admission(closed=True))
        self._tell()

    async def _read(self, step: int) -> Batch | None:
        """The batch that was cut for this step. While its bytes are read other calls go on."""
        ages, counts = self._version_ages, self._ledger.verify_live()
        warning = self._diagnosis() if self._guard.warns else None

        def read() -> Batch:
            with self._ledger.reading() as ledger:
                return Batch(
                    step=step,
                    payloads=tuple(ledger.batch(step)),
                    untrained=tuple(ledger.untrained(step)),
                    version_ages=ages,
                    facts=ledger.reported(step),
                    families=dict.fromkeys(self._families, 0) | ledger.families(step),
                    solved=ledger.solved(step, LATELY),
                    bias=bias_metrics(ledger.durations(BIAS_WINDOW)),
                    counts=counts,
                    warning=warning,
                )

        batch = await self._ledger.aside(read)
        # Without bytes where a rewind took it back meanwhile.
        return batch if batch.payloads else await self.next_batch(step)

    # --- rules -----------------------------------------------------------------------------------

    @property
    def _in_rounds(self) -> bool:
        """The run is synchronous: it plays round after round, and trains between them."""
        return self._settings.pipeline_depth == 0

    def _fresh_guard(self) -> StarvationGuard:
        """Of the groups that the ledger says have ended."""
        bound = self._settings.max_empty_batches * self._settings.batch_groups
        return StarvationGuard(bound, self._ledger.num_without_signal())

    def _max_attempts(self, lease: Lease) -> int:
        """Without those that do not count."""
        return self._settings.max_attempts + self._admitter.casualties.excused(lease[0])

    def _pass_suspects_on(self, tried: int | None) -> None:
        """Who was to try the suspects may run other groups, if another worker came that is to try them now."""
        if tried is not None and tried != self._admitter.tries:
            self._queue.look_again(tried)

    def _lose(self, worker: int, lost: Sequence[Lease], reason: str) -> Loss:
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
        return self.counts.in_batch > 0 and self._ledger.is_cut(step)

    def _can_cut(self) -> bool:
        """A batch is full, or what there is must do."""
        counts = self.counts
        if counts.in_batch or not counts.ready or (self._in_rounds and counts.running):
            return False
        if counts.ready >= self._settings.batch_groups:
            return True
        # What is queued belongs to a round that was cut off.
        relaxes = self._guard.relaxes and not (self._in_rounds and counts.queued)
        return relaxes or self._no_more_will_come()

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
        self._version_ages = version_ages(published, oldest_version=self._oldest_version, same_again=self._in_rounds)

    def _tell(self) -> None:
        """Groups ended or were drawn again, or places are free: workers and the learner that wait go on."""
        self._queue.serve()
        self._changed.set()
        self._changed = asyncio.Event()

    def _move_on(self, step: int, policy_version: int) -> None:
        self._ledger.publish(policy_version, step)
        self._look_at_versions()
        self._admitter.policy_version = max(policy_version, self._admitter.policy_version)
        with self._ledger.together():
            for lease, versions in self._ledger.ready():
                self._expire_if_stale(lease, versions)
        self._tell()

    def _write_some(self) -> None:
        """What came back lately; of very much, the rest after others had their turn."""
        self._write_down(MOST_TOGETHER)
        if self._came_back:
            asyncio.get_running_loop().call_soon(self._write_some)

    def _write_down(self, at_most: int | None = None) -> None:
        """What came back first, or all of it, in one transaction; only then is it answered, and counted."""
        came_back = self._came_back[:at_most]
        del self._came_back[:at_most]
        first: dict[Lease, _Completion] = {}
        for one in came_back:
            if one.lease in self._admitter.runs:
                first.setdefault(one.lease, one)
        ended: set[Lease] = set()
        try:
            with self._ledger.together():
                ended.update(one.lease for one in first.values() if self._settle(one.lease, one.result))
        except Exception as error:
            for one in came_back:
                one.answer(error)
            return
        for one in first.values():
            worker = self._admitter.end(one.lease)
            if self._admitter.casualties.survived(worker, one.lease[0]):
                self._queue.look_at_all()
            self._queue.look_again(worker)
            if one.lease in ended:
                self._guard.observe(signal=one.result.ending == "ready")
        for one in came_back:
            one.answer(first.get(one.lease) is one and one.result.ending == "ready")
        if first:
            self._tell()

    def _settle(self, lease: Lease, result: GroupResult) -> bool:
        """Returns whether the group has ended; else another attempt at it follows."""
        if result.ending is None and lease[1] < self._max_attempts(lease):
            self._ledger.give_back(lease, result.reason, max_attempts=self._max_attempts(lease))
            return False
        self._ledger.settle(lease, result.ending, result, now=self._clock())
        if result.ending == "ready":
            self._expire_if_stale(lease, result.versions)
        return True

    def _expire_if_stale(self, lease: Lease, versions: Mapping[int, int]) -> None:
        """Asked when a group becomes ready, and of all that are when the policy moves on: between, none gets older."""
        ordinal, attempt = lease
        stale = fresh_share(versions, ages=self._version_ages) < LEAST_FRESH_SHARE
        # A task that takes longer than S versions each time is trained on what is left of it in the end.
        if stale and attempt < self._settings.max_attempts:
            self._ledger.expire(ordinal, f"older than version {self._oldest_version}")


@dataclass(frozen=True, slots=True)
class _Completion:
    """A group that came back and is not written down yet. `kept`: whether it will be trained."""

    lease: Lease
    result: GroupResult
    kept: asyncio.Future[bool]

    def answer(self, kept: bool | Exception) -> None:
        if self.kept.done():  # whoever asked is gone
            return
        if isinstance(kept, Exception):
            self.kept.set_exception(kept)
        else:
            self.kept.set_result(kept)
