"""The rollout worker as an actor: admitted groups in, judged groups out, always with proven weights."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from actors.following import WeightFollower
from configs.run import RunConfig
from envs.datasets.generated import GeneratedTask
from envs.datasets.sampler import TaskSampler
from envs.types import Task
from reward.judging import GroupJudge
from reward.outcome import OutcomeReward
from reward.prm import PrmError
from rollout.buffer import Permit
from rollout.types import Trajectory, TrajectoryGroup
from rollout.worker import Worker


@ray.remote
class RolloutWorkerActor:
    def __init__(
        self, config: RunConfig, model_path: Path, index: int, buffer: Any, weights: Any, prm: Any | None
    ) -> None:
        self._config = config
        self._buffer = buffer
        self._worker = Worker(config, model_path, index=index)
        self._judge = GroupJudge(
            OutcomeReward(config.learner, max_turn_tokens=config.rollout.max_turn_tokens),
            prm.score_group.remote if prm else None,
            transient=(PrmError, ray.exceptions.RayActorError),
        )
        data_path = Path(config.envs.data_path) if config.envs.data_path else None
        self._tasks = TaskSampler(config.envs.mix, seed=config.seed, path=data_path)
        self._follower = WeightFollower(self._worker.engine, weights, index)

    async def ready(self) -> bool:
        return True

    async def run(self) -> None:
        """Roll out until the buffer is closed, then drop what still runs. Any error ends the run."""
        max_groups = max(1, 2 * self._config.rollout.engine.max_num_seqs // self._config.rollout.group_size)
        places = asyncio.Semaphore(max_groups)
        async with asyncio.TaskGroup() as background:
            tasks = {background.create_task(self._follower.follow())}
            while permits := await self._buffer.admit.remote(max_groups):
                self._worker.begin_round(len(permits))
                groups = {background.create_task(self._run_group(permit, places)) for permit in permits}
                tasks = {task for task in tasks | groups if not task.done()}
                if self._config.pipeline_depth == 0:
                    await asyncio.gather(*groups)
            for task in tasks:
                task.cancel()

    async def sync_weights(self, policy_version: int) -> None:
        await self._follower.sync(policy_version)

    async def collect(self, task: Task, group_id: str, group_size: int) -> TrajectoryGroup:
        return await self._worker.collect_group(task, group_id, group_size)

    async def continue_from(self, trajectory: Trajectory, num_turns: int, count: int) -> list[Trajectory]:
        return await self._worker.continue_from(trajectory, num_turns, count)

    async def evaluate(self, tasks: Sequence[Task], phase: str) -> list[Trajectory]:
        return await self._worker.evaluate(tasks, phase)

    async def demonstrate(self, tasks: Sequence[GeneratedTask], wrong_share: float) -> list[Trajectory]:
        return await self._worker.demonstrate(tasks, wrong_share)

    async def close(self) -> None:
        self._worker.close()

    async def _run_group(self, permit: Permit, places: asyncio.Semaphore) -> None:
        async with places:
            await self._follower.wait_for(permit.min_policy_version)
            task, group_id = self._tasks.task(permit.ordinal), f"g{permit.ordinal:06d}"
            group = await self._worker.run_group(task, group_id, self._config.rollout.group_size)
        await self._buffer.complete.remote(permit.ordinal, await self._judge.judge(group))
