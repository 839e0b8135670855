"""Admission: how many groups may start, and which of the waiting workers run them."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollout.lifecycle import Admission, WorkerStatus


def admission_capacity(*, pipeline_depth: int, batch_groups: int, live: int) -> int:
    """Return how many groups may be admitted: (D + 1) batches, less the live groups.

    Live groups are counted, never derived from running totals, which would drift for good after one lost group.
    """
    return max(0, (pipeline_depth + 1) * batch_groups - live)


@dataclass(slots=True, eq=False)
class Waiter:
    """A worker's request that waits for free capacity."""

    status: WorkerStatus
    answer: "asyncio.Future[Admission]"


class WaitingWorkers:
    """Requests of workers that wait for free capacity, and the weights that each worker has proven."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self.proven: dict[int, int] = {}
        """Newest version that each worker has proven to sample with."""

    async def wait(self, status: WorkerStatus, serve: Callable[[], None], patience_s: float | None) -> Admission:
        """Return the answer to a request, or an empty one at the end of the patience.

        `serve` is called once the request waits.
        """
        self.proven[status.worker] = max(status.policy_version, self.proven.get(status.worker, -1))
        waiter = Waiter(status, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            serve()
            async with asyncio.timeout(patience_s):
                return await waiter.answer
        except TimeoutError:
            # The answer may have come at the moment in which the patience ended.
            return Admission() if waiter.answer.cancelled() else waiter.answer.result()
        finally:
            waiter.answer.cancel()
            self._waiters.remove(waiter)

    def forget(self, worker: int) -> None:
        """Answer the requests of a lost worker, and forget its weights."""
        self.proven.pop(worker, None)
        self._dismiss([waiter for waiter in self._waiters if waiter.status.worker == worker], Admission())

    def close(self) -> None:
        """Answer all requests: there is no more work."""
        self._dismiss(self._waiters, Admission(closed=True))

    def share_out(
        self, running: Mapping[int | None, int], *, available: int, share: int, min_version: int
    ) -> Counter[Waiter]:
        """Return how many of the available groups each waiting worker gets.

        Groups are given out one at a time: to the worker that runs the fewest, then to the one that has waited
        longest. `running` counts the groups of each worker; none gets more than its places, nor more than `share`, and
        a worker whose weights are older than `min_version` gets none.
        """
        order = [
            (running.get(waiter.status.worker, 0), number, waiter)
            for number, waiter in enumerate(self._waiters)
            if self.proven.get(waiter.status.worker, -1) >= min_version and not waiter.answer.done()
        ]
        heapq.heapify(order)
        granted: Counter[Waiter] = Counter()
        while available and order:
            num_running, number, waiter = heapq.heappop(order)
            if num_running < min(share, waiter.status.places):
                granted[waiter] += 1
                available -= 1
                heapq.heappush(order, (num_running + 1, number, waiter))
        return granted

    def _dismiss(self, waiters: list[Waiter], answer: Admission) -> None:
        for waiter in waiters:
            if not waiter.answer.done():
                waiter.answer.set_result(answer)
