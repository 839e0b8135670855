"""Collect trajectories of a policy for labelling; what is there already is not collected again."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from configs.errors import UserError
from configs.reward import CollectConfig
from configs.run import RunConfig
from envs.types import Task
from ray_jobs.run.console import sentence
from ray_jobs.run.folder import locked, write_json
from ray_jobs.run.local import LocalRun, local_run
from ray_jobs.run.task_checks import prm_tasks
from reward.collected import CollectedGroups, outcome_of
from rollout.filters import SOLVED
from rollout.types import Group, Trajectory

if TYPE_CHECKING:
    from ray_jobs.run.run import Run

POLICY = "policy.json"


class OtherPolicyError(UserError):
    """Trajectories of two policies would be mixed; the message says in what they differ."""


CollectGroup = Callable[[Task, str, int], Awaitable[Group]]
MAX_OPEN_GROUPS = 24


Item = TypeVar("Item")


async def side_by_side(items: Iterable[Item], work: Callable[[Item], Awaitable[None]], *, most: int) -> None:
    """At most so many at a time. After an error nothing new is begun, and it is raised once all that was begun has
    ended; of several the first."""
    remaining, failures = iter(items), list[Exception]()

    async def run() -> None:
        for item in remaining:
            if failures:
                return
            try:
                await work(item)
            except Exception as error:
                failures.append(error)

    await asyncio.gather(*(run() for _ in range(most)))
    if failures:
        raise failures[0]


async def collect_groups(
    tasks: Sequence[Task],
    store: CollectedGroups,
    config: CollectConfig,
    collect: CollectGroup,
    on_group: Callable[[], None],
) -> None:
    """One group per task, each written as soon as it is done."""

    async def group_of(task: Task) -> None:
        group_id = f"collect/{task.id}"
        if group_id not in store.group_ids:
            store.add(await collect(task, group_id, config.rollouts_per_task))
        on_group()

    await side_by_side(tasks, group_of, most=MAX_OPEN_GROUPS)


def collection_facts(collected: Sequence[Trajectory]) -> dict[str, int]:
    return {
        "num_tasks": len({one.task.id for one in collected}),
        "num_trajectories": len(collected),
        "num_steps": sum(len(one.planner_turns) for one in collected),
        "num_malformed": sum(one.num_format_errors for one in collected),
        "num_right": sum(outcome_of(one) == SOLVED for one in collected),
    }


def collect(run: "Run") -> list[Trajectory]:
    """Trajectories of the current policy on training tasks, from the run folder where they are there already."""
    if run.finished("collect") is None:
        _collect_all(run, prm_tasks(run.config, leak_report=run.folder.leaks))
    return list(CollectedGroups(run.folder.collected).trajectories())


def _collect_all(run: "Run | LocalRun", tasks: Sequence[Task]) -> None:
    store, ask = CollectedGroups(run.folder.collected), run.rollouts.collect_group
    with run.phase("collect", total=len(tasks)) as phase:
        asyncio.run(collect_groups(tasks, store, run.config.collect, ask, phase.advance))
        phase.facts.update(collection_facts(list(store.trajectories())))
    run.console.note(sentence("collected", phase.facts))


def _sampled_with(run: LocalRun) -> dict[str, object]:
    """What the trajectories are sampled with."""
    settings = run.config.collect
    return {
        **run.policy,
        "collect.temperature": settings.temperature,
        "collect.rollouts_per_task": settings.rollouts_per_task,
    }


def _keep_policy(folder: Path, policy: Mapping[str, object]) -> None:
    """Beside the trajectories, before there are any. Raises OtherPolicyError where those that are there were sampled
    with something else: a task that was played is not played again."""
    file = folder / POLICY
    if file.exists():
        begun = json.loads(file.read_text(encoding="utf-8"))
        if changed := [name for name, value in policy.items() if begun.get(name) != value]:
            raise OtherPolicyError(
                f"'{folder}' holds trajectories that were collected with another {', '.join(changed)}; give the same "
                "to add to them, or collect under another name=..."
            )
    elif not CollectedGroups(folder).group_ids:
        write_json(file, policy)


def run_collect(config: RunConfig, adapter: Path | None) -> None:
    """Trajectories of the base model or of a checkpoint into the run folder's `collected/`; resumes. Raises
    OtherPolicyError, and RunLockError where somebody else works on the run."""
    with local_run(config, adapter) as run, locked(run.folder.path):
        tasks = prm_tasks(config, leak_report=run.folder.leaks)
        _keep_policy(run.folder.collected, _sampled_with(run))
        _collect_all(run, tasks)
    run.console.note(f"trajectories: {run.folder.collected}")
