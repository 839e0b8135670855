"""One task to one group: G siblings run side by side."""

import asyncio

from envs.types import Task
from rollout.agent import Agent
from rollout.types import TrajectoryGroup


async def run_group(agent: Agent, task: Task, *, group_id: str, group_size: int, hints: str = "") -> TrajectoryGroup:
    """Run `group_size` trajectories of `task`, all with the same hints: only then can they be compared. Every one comes
    back, failed ones as failed."""
    trajectories = await asyncio.gather(
        *(
            agent.run(task, trajectory_id=f"{group_id}/{index}", group_id=group_id, hints=hints)
            for index in range(group_size)
        )
    )
    return TrajectoryGroup(id=group_id, task=task, trajectories=tuple(trajectories))
