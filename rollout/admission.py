"""Admission: how many groups may start, and which of the waiting workers run them."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout.lifecycle import Admission, WorkerStatus


@dataclass(slots=True, eq=False)
class Waiter:
    """A worker's request that waits for free capacity."""

    status: WorkerStatus
    answer: "asyncio.Future[Admission]"


def admission_capacity(*, pipeline_depth: int, batch_groups: int, live: int) -> int:
    """Return how many groups may be admitted: (D + 1) batches, less the live groups.

    Live groups are counted, never derived from running totals, which would drift for good after one lost group.
    """
    return max(0, (pipeline_depth + 1) * batch_groups - live)


def share_out(
    waiters: Sequence[Waiter], running: Mapping[int | None, int], *, available: int, share: int
) -> Counter[Waiter]:
    """Return how many groups each waiting worker gets, of those that are available.

    Groups are given out one at a time: to the worker that runs the fewest, then to the one that has waited longest.
    `running` counts the groups of each worker; none gets more than its places, nor more than `share`.
    """
    order = [
        (running.get(waiter.status.worker, 0), number, waiter)
        for number, waiter in enumerate(waiters)
        if not waiter.answer.done()
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
