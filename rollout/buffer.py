"""The buffer between rollouts and learner: it admits groups, drops those without signal and cuts batches.

Everything is in memory and runs on one event loop. A group is admitted when fewer than (D + 1) batches are live, runs
on one worker, and ends `ready` or without signal, which frees its place at once. A run that is cut off continues from
the `Snapshot` in its newest checkpoint.
"""

import asyncio
import heapq
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from configs.run import RunConfig
from rollout.filters import (
    LEAST_FRESH_SHARE,
    NoSignalError,
    StarvationGuard,
    bias_metrics,
    fresh_share,
    oldest_trained_version,
    version_ages,
)
from rollout.lifecycle import LIVE, Batch, GroupCounts, LiveGroup, Permit, Ref, Snapshot, State, Totals, sum_of_facts
from rollout.types import GroupSummary

MOST_TRIED = 4
"""Groups that may end for a batch, in batches. Then what is ready must do: where few groups have signal, several small
steps teach more per sampled token than one of a full batch."""
BIAS_WINDOW = 1000
"""Groups that ended last, for the bias metrics."""
NUM_SCORES = 64
"""Groups of a family whose scores are kept: more than a cut-off can take back."""
NUM_SHOWN_SCORES = 8
"""Groups of a family over which its solve rate is shown."""
SHOWN_UNTRAINED = 4
"""Groups without signal per batch that are kept for reading."""


Permits = tuple[Permit, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A worker's request that waits for free capacity."""

    worker: int
    places: int
    answer: "asyncio.Future[Permits | None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def reply(self, answer: Permits | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class GroupBuffer:
    """Admission, filtering and batching of groups.

    `family_of` returns the family of the task with a number. `put` stores an encoded group and returns its reference.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        family_of: Callable[[int], str],
        put: Callable[[bytes], Ref] = lambda payload: payload,
    ) -> None:
        self._config = config
        self._family_of = family_of
        self._put = put
        self._closed = False
        self._changed = asyncio.Event()
        self._waiters: list[Waiter] = []
        self._published: dict[int, int] = {}
        self._next_lease = 0
        self.proven: dict[int, int] = {}
        """Newest version that each worker has proven to sample with."""
        self.restore(Snapshot(), step=0, policy_version=0)

    # --- calls of workers ------------------------------------------------------------------------

    async def admit(
        self, worker: int, policy_version: int, places: int, *, patience_s: float | None = None
    ) -> Permits | None:
        """Return permits for free capacity, none at the end of the patience, and None once the buffer is closed.

        The worker has proven to sample with `policy_version`, and can run `places` groups at a time. Waits for
        capacity. A worker whose weights are too old gets nothing.
        """
        if self._closed:
            return None
        self.proven[worker] = max(policy_version, self.proven.get(worker, -1))
        waiter = Waiter(worker=worker, places=places)
        self._waiters.append(waiter)
        try:
            self._serve()
            if not waiter.answer.done():
                await asyncio.wait([waiter.answer], timeout=patience_s)
            return waiter.answer.result() if waiter.answer.done() else ()
        finally:
            waiter.answer.cancel()
            self._waiters.remove(waiter)

    def prove(self, worker: int, policy_version: int) -> None:
        self.proven[worker] = policy_version
        self._serve()

    def complete(self, lease: int, payload: bytes, summary: GroupSummary) -> bool:
        """Take in a finished group and return whether it can be trained. A lease that is not open changes nothing.

        A group with fewer than two scored trajectories is tried again, and fails in the end.
        """
        ordinal = self._leases.pop(lease, None)
        if ordinal is None:
            return False
        group = self._groups[ordinal]
        self._running_by_worker[group.worker] -= 1
        if summary.ending is None and group.num_tries < self._config.rollout.max_tries:
            self._retry(group, counted=True)
        else:
            self._settle(group, payload, summary)
        self._notify()
        return group.state is State.READY

    def release(self, worker: int, reason: str) -> int:
        """Queue the groups of a worker that is gone again, and return how many it ran.

        At depth 0 its rounds are played again as a whole: only groups that are sampled together come out the same.
        """
        lost = [self._groups[ordinal] for ordinal in self._leases.values() if self._groups[ordinal].worker == worker]
        rounds = {group.round for group in lost}
        for group in lost:
            del self._leases[group.lease]
            if self._synchronous or group.num_tries < self._config.rollout.max_tries:
                self._retry(group, counted=not self._synchronous)
            else:
                self._settle(group, b"", GroupSummary(ending=None, reason=reason))
        if self._synchronous:
            self._undo([group for group in self._ended if group.round in rounds])
        self._running_by_worker.pop(worker, None)
        self.proven.pop(worker, None)
        for waiter in self._waiters:
            if waiter.worker == worker:
                waiter.reply(())
        self._notify()
        return len(lost)

    # --- calls of the training loop --------------------------------------------------------------

    async def next_batch(self, step: int) -> Batch | None:
        """Return the B ready groups with the oldest weights, in a synchronous run once nothing runs.

        Fewer than B when signal has become rare or tasks have run out; None when nothing is left. Raises NoSignalError
        if too many groups in a row had no signal.
        """
        while not self._can_cut():
            if not self._counts[State.READY]:
                if self._no_more_will_come():
                    return None
                if self._guard.gives_up:
                    raise NoSignalError(self._diagnosis())
            await self._changed.wait()
        return self._cut(step)

    def mark_trained(self, step: int, policy_version: int, *, refused: str | None = None) -> None:
        """End the groups of the step's batch as trained, or as refused for this reason.

        The step's weights are published as `policy_version`. Ready groups that are too old now expire.
        """
        for group in self._in_state(State.IN_BATCH):
            self._move(group, State.TRAINED if refused is None else State.REFUSED)
            group.ref = None  # the batch holds its own
            del self._groups[group.ordinal]
        self._guard.begin_batch()
        self._publish(step, policy_version)
        for group in self._in_state(State.READY):
            self._expire_if_stale(group)
        self.snapshot = self._snapshot()
        self._notify()

    def restore(self, snapshot: Snapshot, *, step: int, policy_version: int) -> None:
        """Continue after train step `step`, whose weights are published as `policy_version`.

        Results of earlier leases are ignored.
        """
        self._groups: dict[int, LiveGroup] = {}
        self._leases: dict[int, int] = {}
        self._running_by_worker: Counter[int | None] = Counter()
        self._ended: list[LiveGroup] = []
        """Since the last batch was cut, in that order; ready ones included."""
        self._expired: list[LiveGroup] = []
        self._recent: deque[LiveGroup] = deque(maxlen=BIAS_WINDOW)
        self._num_rounds = 0
        self._left_in_round = 0
        self._counts = Counter({State(name): num for name, num in snapshot.counts.items()})
        self._next_task, self._next_ordinal = snapshot.next_task, snapshot.next_ordinal
        self._scores = defaultdict(list, {family: [*scores] for family, scores in snapshot.scores.items()})
        self._facts, self._reasons = Counter(snapshot.facts), Counter(snapshot.reasons)
        self._signal_row = snapshot.without_signal
        """Groups without signal in a row when the last batch was cut."""
        self._guard = self._new_guard()
        if not self._next_lease:
            # No token was sampled yet, so that earlier versions do not matter.
            self._published.clear()
        self._publish(step, policy_version)
        self.snapshot = snapshot
        for task, num_tries in snapshot.redraw:
            self._add(task, num_tries)
        self._notify()

    def close(self) -> None:
        """End all waiting calls."""
        self._closed = True
        for waiter in self._waiters:
            waiter.reply(None)

    @property
    def counts(self) -> GroupCounts:
        return GroupCounts(drawn=self._next_ordinal, **{str(state): num for state, num in self._counts.items()})

    def totals(self) -> Totals:
        """Return the numbers over the whole run, after checking the counts."""
        self._check_counts()
        facts = self._facts.copy()
        facts.update(sum_of_facts(self._ended))
        return Totals(counts=self.counts, facts=dict(facts), reasons=dict(self._reasons))

    # --- admission -------------------------------------------------------------------------------

    @property
    def _synchronous(self) -> bool:
        return self._config.pipeline_depth == 0

    def _serve(self) -> None:
        """Give out free capacity one group at a time, queued groups first.

        The worker that runs the fewest groups is first, then the one that has waited longest. Each worker gets at most
        its share of all live groups, and nothing while its weights are too old.
        """
        available = self._num_available()
        if not available or not self.proven:
            return
        share = -(-(self._config.pipeline_depth + 1) * self._config.batch_groups // len(self.proven))
        min_version = max(0, self._policy_version - self._config.pipeline_depth)
        order = [
            (self._running_by_worker[waiter.worker], number, waiter)
            for number, waiter in enumerate(self._waiters)
            if self.proven.get(waiter.worker, -1) >= min_version and not waiter.answer.done()
        ]
        heapq.heapify(order)
        granted: Counter[Waiter] = Counter()
        while available and order:
            num_running, number, waiter = heapq.heappop(order)
            if num_running < min(share, waiter.places):
                granted[waiter] += 1
                available -= 1
                heapq.heappush(order, (num_running + 1, number, waiter))
        if not granted:
            return
        self._left_in_round = available
        queued = self._in_state(State.QUEUED) if self._counts[State.QUEUED] else []
        waiting = iter(sorted(queued, key=lambda group: group.task))
        for waiter, num in granted.items():
            self._num_rounds += 1
            waiter.reply(tuple(self._start(next(waiting, None), waiter.worker) for _ in range(num)))

    def _num_available(self) -> int:
        """Groups that may start: queued ones, and new ones where places are left.

        A synchronous run starts only the rest of a round that runs, and nothing during a train step.
        """
        if self._synchronous and self._counts[State.RUNNING]:
            return self._left_in_round
        if self._synchronous and self._counts[State.IN_BATCH]:
            return 0
        queued = self._counts[State.QUEUED]
        # Live groups are counted, never derived from running totals, which would drift for good after one lost group.
        live = sum(self._counts[state] for state in LIVE) - queued
        places = max(0, (self._config.pipeline_depth + 1) * self._config.batch_groups - live)
        if self._config.max_tasks is None:
            return places
        return min(places, queued + max(0, self._config.max_tasks - self._next_task))

    def _start(self, group: LiveGroup | None, worker: int) -> Permit:
        """Run a queued group, or a new one of the next task."""
        group = group or self._add(self._next_task)
        self._move(group, State.RUNNING)
        group.worker, group.round, group.lease = worker, self._num_rounds, self._next_lease
        self._next_lease += 1
        self._leases[group.lease] = group.ordinal
        self._running_by_worker[worker] += 1
        return Permit(lease=group.lease, ordinal=group.ordinal, task=group.task, num_tries=group.num_tries)

    # --- the life of a group ---------------------------------------------------------------------

    def _in_state(self, *states: State) -> list[LiveGroup]:
        return [group for group in self._groups.values() if group.state in states]

    def _add(self, task: int, num_tries: int = 1) -> LiveGroup:
        family = self._family_of(task)
        group = LiveGroup(ordinal=self._next_ordinal, task=task, family=family, num_tries=num_tries)
        self._groups[group.ordinal] = group
        self._counts[State.QUEUED] += 1
        self._next_ordinal += 1
        self._next_task = max(self._next_task, task + 1)
        return group

    def _move(self, group: LiveGroup, state: State) -> None:
        self._counts[group.state] -= 1
        self._counts[state] += 1
        group.state = state

    def _retry(self, group: LiveGroup, *, counted: bool) -> None:
        self._move(group, State.QUEUED)
        group.worker = None
        group.num_tries += counted

    def _settle(self, group: LiveGroup, payload: bytes, summary: GroupSummary) -> None:
        """End a running group. Its content is kept for training, or for reading where few are kept so far."""
        self._move(group, State(summary.ending or State.FAILED))
        group.summary, group.worker = summary, None
        if group.state in (State.FAILED, State.UNSCORED):
            group.reason = summary.reason
            self._reasons[summary.reason] += 1
        if group.state is State.READY:
            group.ref = self._put(payload)
        elif payload:
            kept = [one for one in self._ended if one.ref is not None and one.state is not State.READY]
            if len(kept) < SHOWN_UNTRAINED:
                group.ref = self._put(payload)
        self._ended.append(group)
        self._recent.append(group)
        if summary.scored:
            insort(self._scores[group.family], (group.ordinal, summary.right, summary.scored))
            del self._scores[group.family][:-NUM_SCORES]
        self._guard.observe(signal=group.state is State.READY)
        if group.state is State.READY:
            self._expire_if_stale(group)

    def _undo(self, groups: Sequence[LiveGroup]) -> None:
        """Queue groups that ended again, as if they had not run."""
        self._scores = self._scores_without({group.ordinal for group in groups})
        for group in groups:
            self._move(group, State.QUEUED)
            self._ended.remove(group)
            self._recent.remove(group)
            group.ref, group.summary = None, None
        self._guard = self._new_guard()

    def _expire_if_stale(self, group: LiveGroup) -> None:
        """Draw the task again where too few tokens are young enough.

        A task whose groups always take longer than the bound is trained on the rest of its tokens in the end.
        """
        assert group.summary is not None
        stale = fresh_share(group.summary.versions, ages=self._version_ages) < LEAST_FRESH_SHARE
        if not stale or group.num_tries >= self._config.rollout.max_tries:
            return
        self._move(group, State.EXPIRED)
        group.reason = f"older than version {self._oldest_version}"
        self._reasons[group.reason] += 1
        self._expired.append(group)
        self._add(group.task, group.num_tries + 1)
        group.ref = None

    # --- batches ---------------------------------------------------------------------------------

    def _can_cut(self) -> bool:
        """Return whether a batch is full, or what is ready must do."""
        ready, queued = self._counts[State.READY], self._counts[State.QUEUED]
        if self._counts[State.IN_BATCH] or not ready or (self._synchronous and self._counts[State.RUNNING]):
            return False
        # Queued groups of a synchronous run belong to a round that was cut off.
        tried = len(self._ended) >= MOST_TRIED * self._config.batch_groups and not (self._synchronous and queued)
        return ready >= self._config.batch_groups or tried or self._no_more_will_come()

    def _no_more_will_come(self) -> bool:
        max_tasks, unfinished = self._config.max_tasks, self._counts[State.RUNNING] + self._counts[State.QUEUED]
        return max_tasks is not None and self._next_task >= max_tasks and not unfinished

    def _cut(self, step: int) -> Batch:
        ready = sorted(self._in_state(State.READY), key=lambda group: group.age_key)
        chosen = sorted(ready[: self._config.batch_groups], key=lambda group: group.ordinal)
        for group in chosen:
            self._move(group, State.IN_BATCH)
        self._check_counts()
        kept = (State.READY, State.IN_BATCH, State.EXPIRED)
        dropped = [group for group in self._ended if group.state not in kept]
        held = sorted((one for one in dropped if one.ref is not None), key=lambda group: group.ordinal)
        facts = sum_of_facts(self._ended)
        batch = Batch(
            step=step,
            refs=tuple(group.ref for group in chosen),
            untrained=tuple((one.state, one.reason, one.ref) for one in held),
            rows=tuple(group.row(step) for group in (*dropped, *self._expired, *chosen)),
            version_ages=self._version_ages,
            facts=facts,
            solved=self._solve_rates(),
            bias=bias_metrics(
                [(group.state, group.summary.duration_s, group.num_tokens) for group in self._recent if group.summary]
            ),
            counts=self.counts,
            warning=self._diagnosis() if self._guard.warns else None,
        )
        for group in (*dropped, *self._expired):
            self._groups.pop(group.ordinal, None)
            group.ref = None
        self._facts.update(facts)
        self._ended, self._expired = [], []
        self._signal_row = self._guard.num_without_signal
        return batch

    def _snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps. Groups that no log has yet count as lost."""
        lost = (*self._ended, *self._expired, *self._in_state(*LIVE))
        unreported = {group.ordinal: group for group in lost}
        counts = self._counts.copy()
        for group in unreported.values():
            counts[group.state] -= 1
            counts[State.LOST] += 1
        redraw = [group for group in unreported.values() if group.state is not State.EXPIRED]
        return Snapshot(
            next_task=self._next_task,
            next_ordinal=self._next_ordinal,
            counts={str(state): num for state, num in counts.items() if num},
            redraw=tuple((one.task, one.num_tries) for one in sorted(redraw, key=lambda one: one.task)),
            scores=self._scores_without(unreported.keys()),
            without_signal=self._signal_row,
            facts=dict(self._facts),
            reasons=dict(self._reasons),
        )

    def _scores_without(self, ordinals: Set[int]) -> defaultdict[str, list[tuple[int, float, int]]]:
        kept = {family: [one for one in scores if one[0] not in ordinals] for family, scores in self._scores.items()}
        return defaultdict(list, kept)

    def _solve_rates(self) -> dict[str, float]:
        """Return the share of right trajectories in the last tasks of each family that has any."""
        shown = {family: scores[-NUM_SHOWN_SCORES:] for family, scores in self._scores.items() if scores}
        return {
            family: sum(right for _, right, _ in scores) / sum(scored for *_, scored in scores)
            for family, scores in shown.items()
        }

    def _diagnosis(self) -> str:
        return self._guard.diagnosis(self.counts, self._reasons, self._solve_rates())

    def _check_counts(self) -> None:
        """Raise RuntimeError unless the groups are as many as the counts say."""
        live = Counter(group.state for group in self._in_state(*LIVE))
        if not self.counts.balanced or any(live[state] != self._counts[state] for state in LIVE):
            raise RuntimeError(f"the counts of groups do not add up: {self.counts}, live {dict(live)}")

    def _new_guard(self) -> StarvationGuard:
        guard = StarvationGuard(self._config.max_empty_batches * self._config.batch_groups, self._signal_row)
        for group in self._ended:
            guard.observe(signal=group.summary is not None and group.summary.ending == "ready")
        return guard

    def _publish(self, step: int, policy_version: int) -> None:
        self._published[policy_version] = step
        self._policy_version = max(self._published)
        self._oldest_version = oldest_trained_version(self._published, max_staleness=self._config.max_staleness)
        self._version_ages = version_ages(
            self._published, oldest_version=self._oldest_version, same_again=self._synchronous
        )

    def _notify(self) -> None:
        self._serve()
        self._changed.set()
        self._changed = asyncio.Event()
