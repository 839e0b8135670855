"""Simulated workers and tasks."""

import asyncio
import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from rollout.buffer import GroupBuffer, WorkerStatus
from rollout.store.lifecycle import Ending, GroupResult, Lease, Permit

Fate = Literal["signal", "all_right", "all_wrong", "failed"]

TOKENS_PER_S = 1000
"""Only the proportions count: the tokens of a group stand for its seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTask:
    """The seconds that a group of this task takes on an idle worker, at every attempt, and what it comes to."""

    seconds: float
    fate: Fate

    @property
    def tokens(self) -> int:
        return max(1, round(self.seconds * TOKENS_PER_S))


class TaskSource(Protocol):
    def draw(self, rng: random.Random) -> DrawnTask: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalTasks:
    """Seconds with this median and the standard deviation `sigma` of their logarithm; 0 makes all alike. `shares` say
    what groups come to, whatever they take."""

    median_s: float
    sigma: float
    shares: Mapping[Fate, float] = field(default_factory=lambda: {"signal": 1.0})

    def draw(self, rng: random.Random) -> DrawnTask:
        return DrawnTask(seconds=self.median_s * rng.lognormvariate(0.0, self.sigma), fate=_fate(self.shares, rng))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoTasks:
    """Seconds with this median, of which a share that falls like t to the power of -alpha is longer than t; below 2
    their variance is infinite."""

    median_s: float
    alpha: float
    shares: Mapping[Fate, float] = field(default_factory=lambda: {"signal": 1.0})

    def draw(self, rng: random.Random) -> DrawnTask:
        least_s = self.median_s / 2 ** (1 / self.alpha)
        return DrawnTask(seconds=least_s * rng.paretovariate(self.alpha), fate=_fate(self.shares, rng))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTasks:
    """Groups as they were measured, seconds and fate together: what is hard may be slow and come to nothing."""

    groups: Sequence[DrawnTask]

    def draw(self, rng: random.Random) -> DrawnTask:
        return rng.choice(self.groups)


class TaskStream:
    """The tasks by number. They are drawn in this order whoever asks, so all runs with one seed meet the same ones."""

    def __init__(self, source: TaskSource, seed: int) -> None:
        self._source = source
        self._rng = random.Random(seed)
        self._drawn: list[DrawnTask] = []

    def __getitem__(self, number: int) -> DrawnTask:
        while len(self._drawn) <= number:
            self._drawn.append(self._source.draw(self._rng))
        return self._drawn[number]


def _fate(shares: Mapping[Fate, float], rng: random.Random) -> Fate:
    return rng.choices(list(shares), list(shares.values()))[0]


ENDINGS: Mapping[Fate, Ending | None] = {
    "signal": "ready",
    "all_right": "all_right",
    "all_wrong": "all_wrong",
    "failed": None,
}

OnEnd = Callable[[Permit, Mapping[int, int]], None]
"""Told of a group and its tokens by version just before the buffer is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """`places`: groups at a time. `sync_s`: from publication to sampling with it. `load_slope`: with n groups on a
    worker each of them takes 1 + (n - 1) * load_slope times as long, from moment to moment."""

    places: int
    sync_s: float = 0.0
    load_slope: float = 0.0


class PublishedVersion:
    """The newest policy version there is."""

    def __init__(self) -> None:
        self.policy_version = 0
        self._changed = asyncio.Condition()

    async def publish(self) -> None:
        async with self._changed:
            self.policy_version += 1
            self._changed.notify_all()

    async def wait_newer(self, policy_version: int) -> int:
        """Waits; woken by `publish`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.policy_version > policy_version)
            return self.policy_version


class SimulatedWorker:
    def __init__(
        self,
        index: int,
        settings: WorkerSettings,
        *,
        buffer: GroupBuffer,
        published: PublishedVersion,
        tasks: TaskStream,
        on_end: OnEnd,
    ) -> None:
        self._index = index
        self._settings = settings
        self._buffer = buffer
        self._published = published
        self._tasks = tasks
        self._on_end = on_end
        self._processor = Processor(settings.load_slope)
        self._switches = [(0.0, 0)]
        self._running: set[Lease] = set()
        self._freed = asyncio.Event()
        self._waited_s = 0.0
        self._asked_at: float | None = None
        self._asking: asyncio.Timeout | None = None
        self._now = asyncio.get_running_loop().time

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as background:
            background.create_task(self._follow())
            while True:
                while len(self._running) >= self._settings.places:
                    self._freed.clear()
                    await self._freed.wait()
                for permit in await self._ask():
                    self._running.add(permit.lease)
                    background.create_task(self._run_group(permit))

    def waited_s(self) -> float:
        """Seconds with places free and nothing admitted, so far."""
        return self._waited_s + (0 if self._asked_at is None else self._now() - self._asked_at)

    def taken_s(self) -> float:
        """Seconds that places were taken, so far, added up over places."""
        return self._processor.taken_s()

    async def _ask(self) -> tuple[Permit, ...]:
        """Asks again when a group of its own ends: what it said of itself is old then. The real one asks every few
        seconds."""
        self._asked_at = self._now()
        try:
            async with asyncio.timeout(None) as self._asking:
                return (await self._buffer.admit(self._status())).permits
        except TimeoutError:
            return ()
        finally:
            self._waited_s, self._asked_at, self._asking = self.waited_s(), None, None

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            worker=self._index,
            policy_version=self._switches[-1][1],
            running=tuple(self._running),
            free_places=self._settings.places - len(self._running),
        )

    async def _run_group(self, permit: Permit) -> None:
        started, task = self._now(), self._tasks[permit.task]
        start, end = await self._processor.process(task.seconds)
        versions = tokens_by_version(task, start, end, self._switches)
        self._on_end(permit, versions)
        await self._buffer.complete(
            permit.lease,
            GroupResult(
                ending=ENDINGS[task.fate],
                payload=str(permit.ordinal).encode(),
                versions=versions,
                duration_s=self._now() - started,
                facts={},
                reason="could not be scored",
            ),
        )
        self._running.discard(permit.lease)
        self._freed.set()
        if self._asking:
            self._asking.reschedule(self._now())

    async def _follow(self) -> None:
        """Take up the newest version, prove it, look for a newer one."""
        while True:
            version = await self._published.wait_newer(self._switches[-1][1])
            await asyncio.sleep(self._settings.sync_s)
            self._switches.append((self._processor.work(), version))
            await self._buffer.prove(self._index, version)


class Processor:
    """Groups side by side, each of them the slower the more there are."""

    def __init__(self, slope: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._slope = slope
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._ids = count()
        self._timer: asyncio.TimerHandle | None = None
        self._at = self._loop.time()
        self._work = 0.0
        self._taken_s = 0.0

    def work(self) -> float:
        """Seconds that a group which ran from the beginning would have got done of its own."""
        now = self._loop.time()
        self._work += (now - self._at) / self._factor
        self._taken_s += (now - self._at) * len(self._ends)
        self._at = now
        return self._work

    def taken_s(self) -> float:
        self.work()
        return self._taken_s

    async def process(self, seconds: float) -> tuple[float, float]:
        """Returns the work at which it began and ended."""
        start = self.work()
        done = self._loop.create_future()
        heapq.heappush(self._ends, (start + seconds, next(self._ids), done))
        self._set_timer()
        await done
        return start, start + seconds

    @property
    def _factor(self) -> float:
        return 1 + max(0, len(self._ends) - 1) * self._slope

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        if self._ends:
            self._timer = self._loop.call_later((self._ends[0][0] - self._work) * self._factor, self._end_first)

    def _end_first(self) -> None:
        """The timer was set for the first one: by the clock it has ended, whatever rounding says."""
        work = max(self.work(), self._ends[0][0])
        while self._ends and self._ends[0][0] <= work:
            heapq.heappop(self._ends)[2].set_result(None)
        self._set_timer()


def tokens_by_version(
    task: DrawnTask, start: float, end: float, switches: list[tuple[float, int]]
) -> Mapping[int, int]:
    """The task's tokens, spread evenly from `start` to `end`, by the version that sampled them. `switches`: where each
    version took over, in order."""
    versions: dict[int, int] = {}
    above = task.tokens
    for at, version in reversed(switches):
        below = min(above, max(0, round(task.tokens * (at - start) / (end - start))))
        if above > below:
            versions[version] = above - below
        above = below
        if at <= start:
            break
    return versions
