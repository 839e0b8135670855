"""The buffer between rollouts and learner: admits groups, keeps those with signal, cuts batches.

Every admitted group ends in exactly one way, and the counts say so at any time:
drawn = trained + filtered + failed + live. A dropped group gives its place back at once; otherwise rollouts
would wait for a batch that can never fill.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rollout.filters import has_signal

Item = TypeVar("Item")


def admission_capacity(*, pipeline_depth: int, batch_groups: int, outstanding: int) -> int:
    """Groups that may be admitted now: (D + 1) batches, less what is outstanding.

    Outstanding are live groups: running, ready, or in the batch being trained. Counted live and never from
    running totals, which would drift for good after one lost group.
    """
    return max(0, (pipeline_depth + 1) * batch_groups - outstanding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Leave to run one group: the `ordinal`-th ever drawn, with weights of at least this version."""

    ordinal: int
    min_policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Where all groups ever drawn are. `all_right` and `all_wrong` are the two ways to be filtered."""

    drawn: int = 0
    running: int = 0
    ready: int = 0
    in_batch: int = 0
    trained: int = 0
    all_right: int = 0
    all_wrong: int = 0
    failed: int = 0

    @property
    def filtered(self) -> int:
        return self.all_right + self.all_wrong

    @property
    def outstanding(self) -> int:
        return self.running + self.ready + self.in_batch


class StarvedError(RuntimeError):
    """So many groups in a row carried no signal that training cannot go on; the message says which kind."""


class BufferClosedError(RuntimeError):
    """The buffer was closed while somebody waited on it."""


class GroupBuffer(Generic[Item]):
    """Plain asyncio, used from one event loop."""

    def __init__(self, *, batch_groups: int, pipeline_depth: int, max_empty_batches: int) -> None:
        self._batch_groups = batch_groups
        self._pipeline_depth = pipeline_depth
        self._max_empty_groups = max_empty_batches * batch_groups
        self._changed = asyncio.Condition()
        self._running: dict[int, int] = {}
        self._ready: dict[int, Item] = {}
        self._in_batch: tuple[int, ...] = ()
        self._policy_version = 0
        self._num_without_signal = 0
        self._closed = False
        self.counts = GroupCounts()

    async def admit(self, max_groups: int) -> list[Permit]:
        """Permits for the capacity there is, at least one and at most `max_groups`.

        Waits for capacity; woken by a dropped group, a trained batch, or `close`, after which it returns none.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._capacity() > 0 or self._closed)
            if self._closed:
                return []
            return [self._draw() for _ in range(min(self._capacity(), max_groups))]

    async def complete(self, ordinal: int, item: Item, outcomes: Sequence[float | None]) -> bool:
        """A group came back; True if it is kept. `outcomes`: raw accuracy, None where unscorable."""
        async with self._changed:
            del self._running[ordinal]
            kept = has_signal(outcomes)
            if kept:
                self._ready[ordinal] = item
                self._num_without_signal = 0
                self._count(running=-1, ready=1)
            elif sum(outcome is not None for outcome in outcomes) < 2:
                self._count(running=-1, failed=1)
                self._num_without_signal += 1
            else:
                right = max(outcome for outcome in outcomes if outcome is not None) > 0
                self._count(running=-1, all_right=right, all_wrong=not right)
                self._num_without_signal += 1
            self._changed.notify_all()
        return kept

    async def next_batch(self) -> list[Item]:
        """The B kept groups that were drawn first. Waits until there are B; woken by `complete`.

        At depth 0 it also waits until nothing runs, so that the batch does not depend on who finished first.
        Raises StarvedError, or BufferClosedError after `close`.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._batch_is_full() or self._starved() or self._closed)
            if self._closed:
                raise BufferClosedError("the buffer was closed while the learner waited for a batch")
            if not self._batch_is_full():
                raise StarvedError(self._diagnosis())
            self._in_batch = tuple(sorted(self._ready)[: self._batch_groups])
            self._count(ready=-len(self._in_batch), in_batch=len(self._in_batch))
            return [self._ready.pop(ordinal) for ordinal in self._in_batch]

    async def mark_trained(self, policy_version: int) -> None:
        """The batch is trained and its weights are published: its places are free, the version moves on."""
        async with self._changed:
            self._count(in_batch=-len(self._in_batch), trained=len(self._in_batch))
            self._in_batch = ()
            self._policy_version = policy_version
            self._changed.notify_all()

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _capacity(self) -> int:
        if self._pipeline_depth == 0 and self._running:
            return 0
        return admission_capacity(
            pipeline_depth=self._pipeline_depth,
            batch_groups=self._batch_groups,
            outstanding=self.counts.outstanding,
        )

    def _draw(self) -> Permit:
        permit = Permit(
            ordinal=self.counts.drawn,
            min_policy_version=max(0, self._policy_version - self._pipeline_depth),
        )
        self._running[permit.ordinal] = permit.min_policy_version
        self._count(drawn=1, running=1)
        return permit

    def _batch_is_full(self) -> bool:
        settled = self._pipeline_depth > 0 or not self._running
        return len(self._ready) >= self._batch_groups and settled and not self._in_batch

    def _starved(self) -> bool:
        return self._num_without_signal >= self._max_empty_groups

    def _diagnosis(self) -> str:
        counts = self.counts
        return (
            f"{self._num_without_signal} groups in a row carried no signal (bound {self._max_empty_groups}); of all "
            f"{counts.drawn} drawn, {counts.all_right} were all right, {counts.all_wrong} all wrong, "
            f"{counts.failed} failed. Make the tasks easier (all wrong) or harder (all right), or raise "
            "max_empty_batches"
        )

    def _count(self, **changes: int) -> None:
        self.counts = replace(
            self.counts, **{name: getattr(self.counts, name) + change for name, change in changes.items()}
        )
