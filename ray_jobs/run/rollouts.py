"""The rollout workers of a run as one policy, in the phases in which they do not roll out for training."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray

from envs.types import Task
from ray_jobs.run.actors import NoRoomError, RunActors
from rollout.types import Trajectory, TrajectoryGroup

LOOK_AROUND_S = 0.5


class RayRollouts:
    """`Rollouts` over a run's workers, for one phase. Each call goes to the worker with the fewest open ones, so that
    nobody waits for a share of somebody slow. A worker that dies is replaced, and what it had open is asked again."""

    def __init__(self, actors: RunActors, *, open_each: int, note: Callable[[str], None]) -> None:
        """`open_each`: attempts that one worker may have open."""
        self._actors = actors
        self._open_each = open_each
        self._note = note
        self._open: Counter[int] = Counter()
        self._replacing = threading.Lock()
        self._starting: set[int] = set()
        self._ended_by: Exception | None = None

    @property
    def max_open(self) -> int:
        return self._open_each * len(self._actors.worker_indices)

    async def collect_group(self, task: Task, group_id: str, group_size: int) -> TrajectoryGroup:
        group: TrajectoryGroup = await self._ask("collect_group", task, group_id, group_size)
        return group

    async def continue_from(self, trajectory: Trajectory, num_turns: int, count: int) -> list[Trajectory]:
        ends: list[Trajectory] = await self._ask("continue_from", trajectory, num_turns, count)
        return ends

    async def attempt(
        self, task: Task, trajectory_id: str, *, group_id: str, temperature: float, seed: int
    ) -> Trajectory:
        options = {"group_id": group_id, "temperature": temperature, "seed": seed}
        trajectory: Trajectory = await self._ask("attempt", task, trajectory_id, **options)
        return trajectory

    async def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What a worker answers. Raises CrashLoopError when workers die again and again, and NoRoomError where none is
        left and the cluster has no room for another one."""
        while True:
            index = await self._freest()
            worker = self._actors.worker(index)
            self._open[index] += 1
            try:
                return await getattr(worker, method).remote(*arguments, **options)
            except ray.exceptions.RayActorError as error:
                await asyncio.to_thread(self._replace, index, worker, error)
            finally:
                self._open[index] -= 1

    async def _freest(self) -> int:
        """Waits where every worker is being replaced."""
        while self._ended_by is None:
            if ready := [index for index in self._actors.worker_indices if index not in self._starting]:
                return min(ready, key=lambda index: self._open[index])
            await asyncio.sleep(LOOK_AROUND_S)
        raise self._ended_by

    def _replace(self, index: int, dead: Any, error: Exception) -> None:
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
            self._note(death.news)
            self._actors.watch.deaths.add(death)
            try:
                self._actors.start_worker(index)
                self._actors.bring_up(index)
                return
            except ray.exceptions.RayActorError as again:
                error = again
