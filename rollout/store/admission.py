"""Admission: which worker may begin how many groups now, and who is served next."""

import asyncio
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout.store.casualties import Casualties
from rollout.store.choice import DrawOf, TaskChoice, nobody_chooses
from rollout.store.ledger import Ledger
from rollout.store.ledger_file import LedgerError
from rollout.store.lifecycle import Lease, Permit


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
    """A worker that asks for work: the version that it has proven, what it runs, and how much more it could. Of what it
    runs some may end while it waits: then it is given work for these places, too."""

    worker: int
    policy_version: int
    running: tuple[Lease, ...]
    free_places: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The answer: permits, none where there was no work within the worker's patience; `closed`: never again."""

    permits: tuple[Permit, ...] = ()
    closed: bool = False


class Admitter:
    """The rules of admission over a ledger. `proven`: the version that each worker has shown to sample with; `runs`:
    who runs what. Both are counted as they change: nothing here takes longer where more runs, or more workers are.
    `choice`: which task a new group is of; with None nobody chooses one."""

    def __init__(
        self, settings: BufferSettings, ledger: Ledger, *, policy_version: int, choice: TaskChoice | None = None
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._choice = choice
        self._draw_of = self._choose()
        self._left_in_round = 0
        self.policy_version = policy_version
        self.proven: dict[int, int] = {}
        self.runs: dict[Lease, int] = {}
        self._by_worker: defaultdict[int, dict[Lease, Permit]] = defaultdict(dict)
        for worker, permit in ledger.leases():
            self._begin(worker, permit)
        self.casualties = Casualties()

    def known(self) -> set[int]:
        """The workers that asked for work, and those that run any."""
        return {*self.proven, *self._by_worker}

    def meet(self, status: WorkerStatus) -> None:
        """A worker asks."""
        self.proven[status.worker] = max(status.policy_version, self.proven.get(status.worker, -1))

    @property
    def tries(self) -> int | None:
        """The worker that is to try the suspects; None where there are none."""
        return min(self.proven, default=None) if self.casualties.suspects else None

    def part_from(self, worker: int | None) -> None:
        """A worker is gone, with None all are."""
        for lease in self.runs_of(worker):
            self.end(lease)
        if worker is None:
            self.proven.clear()
        else:
            self.proven.pop(worker, None)

    def lease(self, shares: Iterable[tuple[int, int]]) -> list[list[Permit]]:
        """Give groups to workers, to each as many as stand with it: all together at most what is available."""
        available, given = self.num_available(), []
        # A synchronous round is chosen as things were when it began, whatever of it has ended already.
        if self._settings.pipeline_depth or not self._ledger.counts.running:
            self._draw_of = self._choose()
        with self._ledger.together():
            for worker, num in shares:
                suspects = self.waiting_suspects()
                permits = self._ledger.lease(
                    worker,
                    num,
                    num_new=max(0, available - self._ledger.counts.queued),
                    draw_of=self._draw_of,
                    only=suspects[:1] if self.tries_suspects(worker) else None,
                    without=suspects,
                )
                given.append((worker, permits))
                available -= len(permits)
        self._left_in_round = available
        for worker, permits in given:
            for permit in permits:
                self._begin(worker, permit)
        return [permits for _, permits in given]

    def end(self, lease: Lease) -> int:
        """Nobody runs this group any more. Returns who did."""
        worker = self.runs.pop(lease)
        del self._by_worker[worker][lease]
        if not self._by_worker[worker]:
            del self._by_worker[worker]
        return worker

    def runs_of(self, worker: int | None) -> list[Lease]:
        """What this worker runs, with None what all run, in the order of drawing."""
        return sorted(self.runs if worker is None else self._by_worker.get(worker, ()))

    def lost(self, status: WorkerStatus) -> list[Permit]:
        """What the ledger believes this worker runs, and it does not."""
        mine = self._by_worker.get(status.worker, {})
        return [mine[lease] for lease in sorted(mine.keys() - set(status.running))]

    def num_running(self, worker: int) -> int:
        """Counted by the ledger, which knows of what has ended since the worker asked."""
        return len(self._by_worker.get(worker, ()))

    def room(self, worker: int) -> int:
        """How many groups more this worker may run: up to its share of all that may be live, otherwise who asks first
        runs everything and the others idle. None where its weights are too old; its proof may be newer than what it
        said when it asked."""
        if self.proven.get(worker, -1) < self.min_version:
            return 0
        if self.tries_suspects(worker):
            return 0 if self.num_running(worker) else 1
        live = (self._settings.pipeline_depth + 1) * self._settings.batch_groups
        return -(-live // len(self.proven)) - self.num_running(worker)

    def waiting_suspects(self) -> list[int]:
        """Groups that run alone, and wait for it."""
        if not self.casualties.suspects:
            return []
        return self.casualties.by_suspicion(self.casualties.suspects - {ordinal for ordinal, _ in self.runs})

    def tries_suspects(self, worker: int) -> bool:
        """One worker runs the suspects, one at a time and nothing beside them; the others go on."""
        if not (suspects := self.casualties.suspects):
            return False
        if any(ordinal in suspects for ordinal, _ in self._by_worker.get(worker, ())):
            return True
        return worker == self.tries and bool(self.waiting_suspects())

    def num_available(self) -> int:
        """Groups that may begin: queued ones, and new ones where places are left. A synchronous run plays round after
        round, in one that has begun only what is left of it, and none while it trains."""
        counts = self._ledger.counts
        if self._settings.pipeline_depth == 0 and counts.running:
            return self._left_in_round
        if self._settings.pipeline_depth == 0 and counts.in_batch:
            return 0
        # Queued groups hold a place as well, but not where a batch that was rewound has taken it.
        places = admission_capacity(
            pipeline_depth=self._settings.pipeline_depth,
            batch_groups=self._settings.batch_groups,
            outstanding=counts.outstanding - counts.queued,
        )
        again = min(counts.queued, places)
        new = places - again
        if self._settings.max_tasks is not None:
            new = max(0, min(new, self._settings.max_tasks - self._ledger.next_task))
        return again + new

    @property
    def min_version(self) -> int:
        """The oldest version that a group may begin with."""
        return max(0, self.policy_version - self._settings.pipeline_depth)

    def _choose(self) -> DrawOf:
        return self._choice.by(self._ledger.outcomes, self._ledger.open_tasks) if self._choice else nobody_chooses

    def _begin(self, worker: int, permit: Permit) -> None:
        self.runs[permit.lease] = worker
        self._by_worker[worker][permit.lease] = permit


@dataclass(slots=True, eq=False)
class Waiter:
    """A call that waits. `listed`: it stands in the order of service; otherwise it cannot be served as things are."""

    status: WorkerStatus
    number: int
    answer: asyncio.Future[Admission] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    listed: bool = False


class AdmissionQueue:
    """Gives out places as they become free: to the worker that runs the fewest groups, of several to who has waited
    longest, one group at a time, so that all run about as many. Nobody else is woken.

    Waiters that nothing can be given to, for their weights or for their share, are left out until that may have
    changed: `look_again` at a worker's, `look_at_all`.
    """

    def __init__(self, admitter: Admitter) -> None:
        self._admitter = admitter
        self._waiters: defaultdict[int, list[Waiter]] = defaultdict(list)
        self._order: list[tuple[int, int, Waiter]] = []
        self._num_waiters = 0
        self._num_ever = 0

    def join(self, status: WorkerStatus) -> Waiter:
        waiter = Waiter(status, self._num_ever)
        self._num_ever += 1
        self._num_waiters += 1
        self._waiters[status.worker].append(waiter)
        self._list(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """The call ends, answered or not."""
        waiter.answer.cancel()
        waiters = self._waiters[waiter.status.worker]
        waiters.remove(waiter)
        if not waiters:
            del self._waiters[waiter.status.worker]
        self._num_waiters -= 1
        if len(self._order) > 2 * self._num_waiters + 16:
            self._order = [entry for entry in self._order if not entry[2].answer.done()]
            heapq.heapify(self._order)

    def look_again(self, worker: int) -> None:
        """This worker proved newer weights, or runs less."""
        for waiter in self._waiters.get(worker, ()):
            if not waiter.answer.done():
                self._list(waiter)

    def look_at_all(self) -> None:
        """A share may have grown."""
        for worker in self._waiters:
            self.look_again(worker)

    def serve(self) -> None:
        """Give out what there is. Where that cannot be written down, those who would have got it are told."""
        shares = self._share_out()
        try:
            given = (
                self._admitter.lease((waiter.status.worker, num) for waiter, num in shares.items()) if shares else []
            )
        except LedgerError as error:
            for waiter in shares:
                waiter.answer.set_exception(error)
            return
        for waiter, permits in zip(shares, given, strict=True):
            waiter.answer.set_result(Admission(permits=tuple(permits)))

    def send_away(self, worker: int | None, answer: Admission) -> None:
        """Answer all calls of a worker, with None all calls, without work."""
        gone = list(self._waiters.values()) if worker is None else [self._waiters.get(worker, [])]
        for waiter in (one for waiters in gone for one in waiters if not one.answer.done()):
            waiter.answer.set_result(answer)

    def _list(self, waiter: Waiter) -> None:
        if not waiter.listed:
            waiter.listed = True
            heapq.heappush(self._order, (self._admitter.num_running(waiter.status.worker), waiter.number, waiter))

    def _share_out(self) -> Counter[Waiter]:
        """How many groups each of those who are served gets."""
        given: Counter[Waiter] = Counter()
        by_worker: Counter[int] = Counter()
        held: list[tuple[int, int, Waiter]] = []
        available = self._admitter.num_available()
        # Of these, one worker takes one; nobody else gets them.
        num_suspects = len(self._admitter.waiting_suspects())
        while available and self._order:
            expected, number, waiter = heapq.heappop(self._order)
            worker = waiter.status.worker
            if waiter.answer.done():
                continue
            running = self._admitter.num_running(worker) + by_worker[worker]
            places = waiter.status.free_places + len(waiter.status.running)
            room = min(places - running, self._admitter.room(worker) - by_worker[worker])
            if room <= 0:
                waiter.listed = False
            elif available <= num_suspects and not self._admitter.tries_suspects(worker):
                held.append((expected, number, waiter))
            elif running > expected:
                heapq.heappush(self._order, (running, number, waiter))
            else:
                given[waiter] += 1
                by_worker[worker] += 1
                available -= 1
                num_suspects -= self._admitter.tries_suspects(worker)
                heapq.heappush(self._order, (running + 1, number, waiter))
        for entry in held:
            heapq.heappush(self._order, entry)
        return +given
