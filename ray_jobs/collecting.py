"""Collect trajectories of a policy on a task set, for labelling; what is there already is not collected again."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from configs.reward import CollectConfig
from envs.types import Task
from reward.collected import CollectedGroups, outcome_of
from rollout.types import Trajectory, TrajectoryGroup

CollectGroup = Callable[[Task, str, int], Awaitable[TrajectoryGroup]]
MAX_OPEN_GROUPS = 24


async def collect_groups(
    tasks: Sequence[Task],
    store: CollectedGroups,
    config: CollectConfig,
    collect: CollectGroup,
    on_group: Callable[[], None],
) -> None:
    """One group per task, several side by side, each written as soon as it is done.

    An error begins nothing new and is raised when what was begun is written.
    """
    remaining = iter(tasks)
    failures: list[Exception] = []

    async def run() -> None:
        for task in remaining:
            if failures:
                return
            group_id = f"collect/{task.id}"
            if group_id not in store.group_ids:
                try:
                    store.add(await collect(task, group_id, config.rollouts_per_task))
                except Exception as error:
                    failures.append(error)
                    return
            on_group()

    await asyncio.gather(*(run() for _ in range(MAX_OPEN_GROUPS)))
    if failures:
        raise failures[0]


def collection_facts(collected: Sequence[Trajectory]) -> dict[str, int]:
    return {
        "num_tasks": len({one.task.id for one in collected}),
        "num_trajectories": len(collected),
        "num_steps": sum(len(one.planner_turns) for one in collected),
        "num_malformed": sum(one.num_format_errors for one in collected),
        "num_right": sum(outcome_of(one) == 1.0 for one in collected),
    }
