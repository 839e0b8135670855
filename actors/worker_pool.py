"""The rollout workers of a run as one policy, for every phase outside of training rollouts."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from actors.cluster import PART_LOST, Handle
from actors.supervisor import Supervisor
from envs.datasets.generated import GeneratedTask
from envs.types import Task
from rollout.engines.engine import BASE_VERSION
from rollout.types import Group, Trajectory

Result = TypeVar("Result")

LOOK_EVERY_S = 0.5


class WorkerPool:
    """Sends each call to the worker with the fewest open ones.

    A call whose worker is lost is repeated on another one; the supervisor replaces the worker.
    """

    def __init__(self, supervisor: Supervisor, *, max_open_each: int) -> None:
        """`max_open_each`: open attempts of one worker."""
        self._supervisor = supervisor
        self._max_open_each = max_open_each
        self._open: Counter[int] = Counter()
        self._lost: dict[int, Handle] = {}
        """Workers that failed a call, by index, until they are replaced."""
        self.policy_version = BASE_VERSION
        """The version that was published last; a worker answers no call before it uses this version or a newer one."""

    @property
    def max_open(self) -> int:
        return self._max_open_each * max(1, len(self._supervisor.workers))

    async def collect_group(self, task: Task, group_id: str, group_size: int) -> Group:
        return await self._call("collect_group", task, group_id, group_size)

    async def continue_from(self, trajectory: Trajectory, num_turns: int, count: int) -> list[Trajectory]:
        return await self._call("continue_from", trajectory, num_turns, count)

    async def attempt(
        self, task: Task, trajectory_id: str, *, group_id: str, temperature: float, seed: int
    ) -> Trajectory:
        return await self._call("attempt", task, trajectory_id, group_id=group_id, temperature=temperature, seed=seed)

    async def demonstrate(self, tasks: Sequence[GeneratedTask]) -> list[Trajectory]:
        return await self._call("demonstrate", tasks)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        while True:
            index, worker = await self._freest_worker()
            self._open[index] += 1
            try:
                return await worker.act.remote(self.policy_version, method, *args, **kwargs)
            except PART_LOST:
                self._lost[index] = worker
            finally:
                self._open[index] -= 1

    async def _freest_worker(self) -> tuple[int, Handle]:
        """Wait for a worker that has started. Raises what ends the run."""
        while True:
            self._supervisor.check()
            workers = self._supervisor.workers
            ready = [index for index, worker in workers.items() if self._lost.get(index) is not worker]
            if ready:
                index = min(ready, key=lambda index: self._open[index])
                return index, workers[index]
            await asyncio.sleep(LOOK_EVERY_S)
