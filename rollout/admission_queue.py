"""Workers that wait for admission: who is served next, at a cost that does not grow with how many wait."""

import asyncio
import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from rollout.admission import Admission, Admitter, WorkerStatus
from rollout.ledger import LedgerError


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
            room = min(waiter.status.free_places - given[waiter], self._admitter.room(worker) - by_worker[worker])
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
