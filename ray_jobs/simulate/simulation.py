"""A run played by its own rules in virtual time."""

import asyncio
import math
import selectors
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

from ray_jobs.simulate.worker import (
    DrawnTask,
    PublishedVersion,
    SimulatedWorker,
    TaskSource,
    TaskStream,
    WorkerSettings,
)
from rollout.buffer import Batch, BufferSettings, GroupBuffer
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupCounts, Permit
from rollout.store.staleness import bias_metrics

Result = TypeVar("Result")


class NothingWillHappenError(RuntimeError):
    """Everything waits and no timer is set: in real time the program would hang."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that waits only for itself. A thread or a socket answers in real time, which never passes here."""

    def __init__(self) -> None:
        self._jumps = _JumpingSelector()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now


class _JumpingSelector(selectors.DefaultSelector):
    """Where the loop would wait for the outside world, time moves on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []
        if timeout is None:
            raise NothingWillHappenError(
                f"at {self.now:.3f} s of virtual time everything waits and no timer is set; a waiter is never woken"
            )
        # The loop runs what is due before now, not at it: beyond 10^7 s the resolution that it adds rounds to nothing.
        self.now = math.nextafter(self.now + timeout, math.inf)
        return []


def run_in_virtual_time(main: Coroutine[object, object, Result]) -> Result:
    """As `asyncio.run`; the clock begins at 0. Raises NothingWillHappenError instead of hanging."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """`step_s`: the learner's seconds per train step."""

    buffer: BufferSettings
    tasks: TaskSource
    worker: WorkerSettings
    num_workers: int
    group_size: int
    step_s: float
    num_steps: int = 200
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGroup:
    """A group that ended while the learner had `policy_version`. An expired one has a successor of the same task.
    `masked_tokens` were beyond the cap when it was trained; None where it was not."""

    task: int
    drawn: DrawnTask
    versions: Mapping[int, int]
    policy_version: int
    masked_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionBias:
    """Whether what is trained is what was drawn, over the cohort's tasks with signal, as `bias_metrics` counts.

    `slow_decile_drawn` is its value if all were trained: 0.1, but for rounding and for tasks of equal length.
    """

    num_tasks: int
    length_trained_over_drawn: float
    slow_decile_trained: float
    slow_decile_drawn: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Rates, shares, staleness and counts are those of the settings' train steps, from an empty buffer on.

    `learner_idle`: share of the time, waiting for a batch. `backpressure`: of the workers' time, waiting for admission
    with places free. `places_used`: of all places, with a group in them. Staleness is the age of the trained tokens
    when their batch is cut; `masked` is the share of the batches' tokens that were beyond the cap.

    `bias` (None with fewer than ten tasks to speak of) is over the cohort: all tasks drawn before half of the steps.
    The run goes on after its last step, with groups drawn and batches trained as ever, until each of them has ended,
    so none is missing for being slow; after half as many steps again `num_open` are left, which count as not trained.
    `cohort` holds their groups.
    """

    trajectories_per_s: float
    wall_s: float
    learner_idle: float
    backpressure: float
    places_used: float
    staleness_mean: float
    staleness_p95: int
    staleness_max: int
    masked: float
    counts: GroupCounts
    bias: SelectionBias | None
    num_open: int
    cohort: tuple[SimulatedGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """What the clocks said after the settings' last step."""

    wall_s: float
    learner_waited_s: float
    workers_waited_s: float
    places_taken_s: float


def simulate(settings: SimulationSettings) -> SimulationResult:
    """Run the settings in virtual time. Raises StarvedError where a real run would."""

    async def played() -> SimulationResult:
        return await _Simulation(settings).run()

    return run_in_virtual_time(played())


class _Simulation:
    """The learner's loop, and notes of what ended and what was trained."""

    def __init__(self, settings: SimulationSettings) -> None:
        self._settings = settings
        self._now = asyncio.get_running_loop().time
        self._ledger = Ledger(None)
        self._buffer = GroupBuffer(settings.buffer, self._ledger, clock=self._now)
        self._published = PublishedVersion()
        self._tasks = TaskStream(settings.tasks, settings.seed)
        self._workers = [
            SimulatedWorker(
                index,
                settings.worker,
                buffer=self._buffer,
                published=self._published,
                tasks=self._tasks,
                on_end=self._note_end,
            )
            for index in range(settings.num_workers)
        ]
        self._ended: dict[int, SimulatedGroup] = {}
        self._settled_tasks: set[int] = set()
        self._cohort_size = 0
        self._waited_s = 0.0
        self._ages: Counter[int] = Counter()
        self._num_masked = 0

    async def run(self) -> SimulationResult:
        learner = asyncio.create_task(self._learn())
        workers = [asyncio.create_task(worker.run()) for worker in self._workers]
        done, others = await asyncio.wait([learner, *workers], return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for task in done - {learner}:
            task.result()
        return self._result(*learner.result())

    async def _learn(self) -> tuple[_Times, GroupCounts]:
        for step in count(1):
            asked = self._now()
            batch = await self._buffer.next_batch(step)
            self._waited_s += self._now() - asked
            assert batch is not None, "there is always a next task"
            self._note_batch(batch)
            await asyncio.sleep(self._settings.step_s)
            await self._published.publish()
            await self._buffer.mark_trained(step, self._published.policy_version)
            if step == self._settings.num_steps:
                times, counts = self._times(), self._ledger.verify()
            if step >= 1.5 * self._settings.num_steps or (step >= self._settings.num_steps and not self._num_open()):
                break
        return times, counts

    def _note_end(self, permit: Permit, versions: Mapping[int, int]) -> None:
        drawn, version = self._tasks[permit.task], self._published.policy_version
        self._ended[permit.ordinal] = SimulatedGroup(
            task=permit.task, drawn=drawn, versions=versions, policy_version=version
        )
        is_last = permit.attempt >= self._settings.buffer.max_attempts
        if drawn.fate in ("all_right", "all_wrong") or (drawn.fate == "failed" and is_last):
            self._settled_tasks.add(permit.task)

    def _note_batch(self, batch: Batch) -> None:
        if batch.step == max(1, self._settings.num_steps // 2):
            self._cohort_size = self._ledger.next_task
        for ordinal in map(int, batch.payloads):
            group = self._ended[ordinal]
            self._settled_tasks.add(group.task)
            masked = sum(num for version, num in group.versions.items() if version not in batch.version_ages)
            self._ended[ordinal] = replace(group, masked_tokens=masked)
            if batch.step <= self._settings.num_steps:
                self._num_masked += masked
                for version, num in group.versions.items():
                    if version in batch.version_ages:
                        self._ages[batch.version_ages[version]] += num

    def _num_open(self) -> int:
        return sum(task not in self._settled_tasks for task in range(self._cohort_size))

    def _times(self) -> _Times:
        return _Times(
            wall_s=self._now(),
            learner_waited_s=self._waited_s,
            workers_waited_s=sum(worker.waited_s() for worker in self._workers),
            places_taken_s=sum(worker.taken_s() for worker in self._workers),
        )

    def _result(self, times: _Times, counts: GroupCounts) -> SimulationResult:
        num_workers, num_trained = self._settings.num_workers, self._ages.total()
        trained_tasks = {group.task for group in self._ended.values() if group.masked_tokens is not None}
        drawn = [number for number in range(self._cohort_size) if self._tasks[number].fate == "signal"]
        return SimulationResult(
            trajectories_per_s=counts.trained * self._settings.group_size / times.wall_s,
            wall_s=times.wall_s,
            learner_idle=times.learner_waited_s / times.wall_s,
            backpressure=times.workers_waited_s / num_workers / times.wall_s,
            places_used=times.places_taken_s / num_workers / self._settings.worker.places / times.wall_s,
            staleness_mean=sum(age * num for age, num in self._ages.items()) / max(1, num_trained),
            staleness_p95=_percentile(self._ages, 0.95),
            staleness_max=max(self._ages, default=0),
            masked=self._num_masked / max(1, num_trained + self._num_masked),
            counts=counts,
            bias=selection_bias([(self._tasks[number], number in trained_tasks) for number in drawn]),
            num_open=self._num_open(),
            cohort=tuple(group for group in self._ended.values() if group.task < self._cohort_size),
        )


def selection_bias(tasks: Sequence[tuple[DrawnTask, bool]]) -> SelectionBias | None:
    """`tasks`: with signal, and whether each was trained. None where they are too few."""
    found = bias_metrics([("trained" if trained else "expired", task.seconds, task.tokens) for task, trained in tasks])
    if not found:
        return None
    unbiased = bias_metrics([("trained", task.seconds, task.tokens) for task, _ in tasks])
    return SelectionBias(
        num_tasks=len(tasks),
        length_trained_over_drawn=found["bias/length_trained_over_drawn"],
        slow_decile_trained=found["bias/slow_decile_share"],
        slow_decile_drawn=unbiased["bias/slow_decile_share"],
    )


def _percentile(counts: Counter[int], share: float) -> int:
    """The least value that so large a share of all does not exceed."""
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return 0
