"""Admission: which worker may begin how many groups now, and whether its weights are new enough."""

from dataclasses import dataclass

from rollout.casualties import Casualties
from rollout.ledger import Ledger
from rollout.lifecycle import Permit


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


class Admitter:
    """The rules of admission over a ledger. `proven`: the version that each worker has shown to sample with; `runs`:
    who runs what."""

    def __init__(self, settings: BufferSettings, ledger: Ledger, *, policy_version: int) -> None:
        self._settings = settings
        self._ledger = ledger
        self._left_in_round = 0
        self.policy_version = policy_version
        self.proven: dict[int, int] = {}
        self.runs = {permit.lease: worker for worker, permit in ledger.leases()}
        self.casualties = Casualties()

    def known(self) -> set[int]:
        """The workers that asked for work, and those that run any."""
        return {*self.proven, *self.runs.values()}

    def meet(self, status: WorkerStatus) -> None:
        """A worker asks."""
        self.proven[status.worker] = max(status.policy_version, self.proven.get(status.worker, -1))

    def part_from(self, worker: int | None) -> None:
        """A worker is gone, with None all are."""
        self.runs = {lease: one for lease, one in self.runs.items() if worker not in (None, one)}
        self.proven = {one: version for one, version in self.proven.items() if worker not in (None, one)}

    def may_work(self, status: WorkerStatus) -> bool:
        """Whether there is anything for this worker now. Its proof may be newer than what it said when it asked."""
        proven = self.proven.get(status.worker, -1) >= self._min_version()
        return proven and self._num_for(status) > 0

    def lease(self, status: WorkerStatus) -> list[Permit]:
        available, suspects = self._num_available(), self._waiting_suspects()
        permits = self._ledger.lease(
            status.worker,
            self._num_for(status),
            num_new=max(0, available - self._ledger.counts.queued),
            min_version=self._min_version(),
            only=suspects[:1] if self._tries_suspects(status.worker) else None,
            without=suspects,
        )
        self._left_in_round = available - len(permits)
        self.runs |= {permit.lease: status.worker for permit in permits}
        return permits

    def _num_for(self, status: WorkerStatus) -> int:
        """Groups that this worker may begin: its free places, or one suspect and nothing beside it."""
        suspects = self._waiting_suspects()
        if self._tries_suspects(status.worker):
            alone = not self._num_running(status.worker)
            return min(1, self._num_places(status), self._num_available()) if alone else 0
        return min(self._num_places(status), self._num_available() - len(suspects))

    def _waiting_suspects(self) -> list[int]:
        """Groups that run alone, and wait for it."""
        if not self.casualties.suspects:
            return []
        running = {ordinal for ordinal, _ in self.runs}
        return self.casualties.by_suspicion(self.casualties.suspects - running)

    def _tries_suspects(self, worker: int) -> bool:
        """One worker runs the suspects, one at a time; the others go on."""
        if not (suspects := self.casualties.suspects):
            return False
        if any(one == worker and ordinal in suspects for (ordinal, _), one in self.runs.items()):
            return True
        return worker == min(self.proven) and bool(self._waiting_suspects())

    def _min_version(self) -> int:
        return max(0, self.policy_version - self._settings.pipeline_depth)

    def lost(self, status: WorkerStatus) -> list[Permit]:
        """What the ledger believes this worker runs, and it does not."""
        mine = {lease for lease, worker in self.runs.items() if worker == status.worker}
        if mine <= set(status.running):
            return []
        return [
            one for worker, one in self._ledger.leases() if worker == status.worker and one.lease not in status.running
        ]

    def _num_running(self, worker: int) -> int:
        return sum(one == worker for one in self.runs.values())

    def _num_places(self, status: WorkerStatus) -> int:
        """Free places, within the worker's share of all that may be live: otherwise who asks first runs everything and
        the others idle. What it runs is counted by the ledger, which knows of what has ended since it asked."""
        live = (self._settings.pipeline_depth + 1) * self._settings.batch_groups
        return min(status.free_places, -(-live // len(self.proven)) - self._num_running(status.worker))

    def _num_available(self) -> int:
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
