"""The rollout workers of a run as one policy, in the phases in which they do not roll out for training."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rollout.store.adapters import AdapterMismatchError

from actors.cluster import PART_LOST
from envs.types import Task
from ray_jobs.run.actors import NoRoomError, RunActors
from rollout.engines.engine import BASE_VERSION
from rollout.types import Group, Trajectory

if TYPE_CHECKING:
    from actors.handles import WorkerHandle

Answer = TypeVar("Answer")

LOOK_AROUND_S = 0.5
WORKER_LOST = (*PART_LOST, AdapterMismatchError)
"""It died, or its engine does not sample with what was published."""


class RayRollouts:
    """`Rollouts` over a run's workers, for one phase. Each call goes to the worker with the fewest open ones, so that
    nobody waits for a share of somebody slow. A worker that dies is replaced, and what it had open is asked again."""

    policy_version = BASE_VERSION
    """The least that a worker must have proven before it attempts; each is brought up to date as it starts."""

    def __init__(self, actors: RunActors, *, open_each: int, note: Callable[[str], None]) -> None:
        """`open_each`: attempts that one worker may have open."""
        self._actors = actors
        self._open_each = open_each
        self._note = note
        self._open: Counter[int] = Counter()
        self._replacing = threading.Lock()
        self._starting: set[int] = set()
        self._answered: set[int] = set()
        self._ended_by: BaseException | None = None

    @property
    def max_open(self) -> int:
        # All of them may just be dying, and others come.
        return self._open_each * max(1, len(self._actors.worker_indices))

    async def collect_group(self, task: Task, group_id: str, group_size: int) -> Group:
        return await self._ask(lambda worker: worker.collect_group.remote(task, group_id, group_size))

    async def continue_from(self, trajectory: Trajectory, num_turns: int, count: int) -> list[Trajectory]:
        return await self._ask(lambda worker: worker.continue_from.remote(trajectory, num_turns, count))

    async def attempt(
        self, task: Task, trajectory_id: str, *, group_id: str, temperature: float, seed: int
    ) -> Trajectory:
        version = self.policy_version
        return await self._ask(
            lambda worker: worker.attempt.remote(
                task, trajectory_id, group_id=group_id, temperature=temperature, seed=seed, policy_version=version
            )
        )

    async def _ask(self, call: "Callable[[WorkerHandle], Awaitable[Answer]]") -> Answer:
        """What a worker answers. Raises CrashLoopError when workers die again and again, and NoRoomError where none is
        left and the cluster has no room for another one."""
        while True:
            index, worker = await self._freest()
            self._open[index] += 1
            try:
                answer = await call(worker)
                self._answered.add(index)
                return answer
            except PART_LOST as error:
                await self._lost(index, worker, error)
            finally:
                self._open[index] -= 1

    async def _freest(self) -> "tuple[int, WorkerHandle]":
        """Waits where every worker is being replaced."""
        while self._ended_by is None:
            if ready := self._ready():
                return min(ready.items(), key=lambda one: self._open[one[0]])
            await asyncio.sleep(LOOK_AROUND_S)
        raise self._ended_by

    def _ready(self) -> "dict[int, WorkerHandle]":
        """The workers that may be asked, by their index."""
        return {index: worker for index, worker in self._actors.by_index.items() if index not in self._starting}

    async def _lost(self, index: int, worker: "WorkerHandle", error: Exception) -> None:
        """Returns when what it had open may be asked again."""
        await asyncio.to_thread(self._replace, index, worker, error)

    def _replace(self, index: int, dead: "WorkerHandle", error: Exception) -> None:
        """Start another worker in the place of one that died, up and with the newest weights; of many callers that lost
        the same one the first does it, and the others wait."""
        with self._replacing:
            if index not in self._actors.worker_indices or self._actors.worker(index) is not dead:
                return
            self._starting.add(index)
            try:
                self._start_anew(index, error)
            except NoRoomError as failure:
                if not self._actors.workers:
                    self._ended_by = failure
                    raise
                self._note(f"going on without rollout worker {index}: {failure}")
            except Exception as failure:
                self._ended_by = failure
                raise
            finally:
                self._starting.discard(index)

    def _start_anew(self, index: int, error: Exception) -> None:
        while True:
            death = self._actors.lose_worker(index, error)
            # The store knows of groups for training alone.
            death = replace(death, fruitless=death.fruitless and index not in self._answered)
            self._answered.discard(index)
            self._note(death.news)
            self._actors.watch.deaths.add(death)
            try:
                self._actors.start_worker(index)
                self._actors.bring_up(index)
                return
            except WORKER_LOST as again:
                error = again


class PinnedRollouts(RayRollouts):
    """The same while the RL loop goes on, all with one policy version: a worker is asked, and attempts, once it has
    proven it, and none may be published meanwhile. The supervisor replaces those that die; they are waited for."""

    def __init__(self, actors: RunActors, *, open_each: int, note: Callable[[str], None], policy_version: int) -> None:
        super().__init__(actors, open_each=open_each, note=note)
        self.policy_version = policy_version
        self._dead: dict[int, WorkerHandle] = {}

    def end(self, error: BaseException) -> None:
        """Nobody will be replaced any more: whoever asks or waits is given this error."""
        self._ended_by = error

    def _ready(self) -> "dict[int, WorkerHandle]":
        return {index: worker for index, worker in self._actors.by_index.items() if self._dead.get(index) is not worker}

    async def _lost(self, index: int, worker: "WorkerHandle", error: Exception) -> None:
        self._dead[index] = worker
