"""Collection of trajectories, to label and to train a PRM on; tasks that have some are not collected again."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import UserError
from configs.reward import CollectConfig
from configs.run import RunConfig
from envs.types import Task
from ray_jobs.run.console import sentence
from ray_jobs.run.folder import locked, write_json
from ray_jobs.run.local import LocalRun
from ray_jobs.run.task_checks import prm_tasks
from ray_jobs.side_by_side import side_by_side
from reward.scorers import outcome_of
from rollout.codec import SchemaError, group_line, group_of
from rollout.filters import SOLVED
from rollout.records import append_line, whole_lines
from rollout.types import Group, Reward, Trajectory

if TYPE_CHECKING:
    from ray_jobs.run.run import Run

MAX_OPEN_GROUPS = 24

CollectGroup = Callable[[Task, str, int], Awaitable[Group]]


class CollectedGroups:
    """A folder with a file of groups. A group is one line: it is there whole or not at all, whenever a process ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "groups.jsonl"
        self.group_ids = {group.id for group in self._groups()}

    def add(self, group: Group) -> None:
        """Write a group. One that could not be scored at all is left out, so that it is collected again."""
        if group.id in self.group_ids or all(one.stop_reason == "infrastructure" for one in group.trajectories):
            return
        for trajectory in group.trajectories:
            outcome = outcome_of(trajectory)
            trajectory.phase, trajectory.reward = "collect", Reward(outcome=outcome, total=outcome)
        append_line(self._path, group_line(group))
        self.group_ids.add(group.id)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield every trajectory, in the order of the file. Raises UserError for another schema."""
        for group in self._groups():
            yield from group.trajectories

    def _groups(self) -> Iterator[Group]:
        for line in whole_lines(self._path) if self._path.exists() else ():
            try:
                yield group_of(line)
            except SchemaError as error:
                raise UserError(f"{self._path}: {error}; collect again") from error


async def collect_groups(
    tasks: Sequence[Task],
    store: CollectedGroups,
    config: CollectConfig,
    collect: CollectGroup,
    on_group: Callable[[], None],
) -> None:
    """Collect one group per task; each is written as soon as it is complete."""

    async def collect_one(task: Task) -> None:
        group_id = f"collect/{task.id}"
        if group_id not in store.group_ids:
            store.add(await collect(task, group_id, config.rollouts_per_task))
        on_group()

    await side_by_side(tasks, collect_one, limit=MAX_OPEN_GROUPS)


def collection_facts(collected: Sequence[Trajectory]) -> dict[str, int]:
    """Return the counts of collected trajectories, as facts of the phase."""
    return {
        "num_tasks": len({trajectory.task.id for trajectory in collected}),
        "num_trajectories": len(collected),
        "num_steps": sum(len(trajectory.planner_turns) for trajectory in collected),
        "num_malformed": sum(trajectory.num_format_errors for trajectory in collected),
        "num_right": sum(outcome_of(trajectory) == SOLVED for trajectory in collected),
    }


def collect(run: "Run") -> list[Trajectory]:
    """Return trajectories of the current policy on training tasks; those in the run folder are not collected again."""
    if run.finished("collect") is None:
        _collect_all(run, prm_tasks(run.config))
    return list(CollectedGroups(run.folder.collected).trajectories())


def _collect_all(run: "Run | LocalRun", tasks: Sequence[Task]) -> None:
    store, collect_group = CollectedGroups(run.folder.collected), run.rollouts.collect_group
    with run.phase("collect", total=len(tasks)) as phase:
        asyncio.run(collect_groups(tasks, store, run.config.collect, collect_group, phase.advance))
        phase.facts.update(collection_facts(list(store.trajectories())))
    run.console.note(sentence("collected", phase.facts))


def run_collect(config: RunConfig, adapter: Path | None) -> None:
    """Collect trajectories of the base model or of a checkpoint into `collected/` of the run folder, or continue to.

    Raises UserError if the folder holds trajectories of another policy, and RunLockError if another process works on
    the run.
    """
    with LocalRun(config, adapter) as run, locked(run.folder.path):
        tasks = prm_tasks(config)
        _keep_policy(run)
        _collect_all(run, tasks)
    run.console.note(f"trajectories: {run.folder.collected}")


def _keep_policy(run: LocalRun) -> None:
    """Write down the policy before the first trajectory, and check that later ones are sampled with the same."""
    settings, folder = run.config.collect, run.folder.collected
    file = folder / "policy.json"
    policy = {
        **run.policy,
        "collect.temperature": settings.temperature,
        "collect.rollouts_per_task": settings.rollouts_per_task,
    }
    if file.exists():
        recorded = json.loads(file.read_text(encoding="utf-8"))
        if changed := [name for name, value in policy.items() if recorded.get(name) != value]:
            raise UserError(
                f"'{folder}' holds trajectories that were collected with another {', '.join(changed)}; use the same "
                "to add to them, or collect under another name=..."
            )
    elif not CollectedGroups(folder).group_ids:
        write_json(file, policy)
