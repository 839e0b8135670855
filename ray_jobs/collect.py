"""Collect trajectories of one policy, without Ray: the first step towards a process reward model."""

import asyncio
from pathlib import Path

from configs.run import RunConfig
from envs.datasets.collection import collection_tasks
from ray_jobs.collecting import collect_groups, collection_facts
from ray_jobs.console import Console, sentence
from ray_jobs.run_folder import run_path
from ray_jobs.single import open_policy
from reward.collected import CollectedGroups


def run_collect(config: RunConfig, adapter: Path | None) -> None:
    """Trajectories of the base model or of a checkpoint into the run folder's `collected/`; resumes."""
    console, folder = Console(), run_path(config)
    store = CollectedGroups(folder / "collected")
    tasks = collection_tasks(config.envs, config.collect, seed=config.seed, leak_report=folder / "leaks.json")
    with open_policy(config, adapter) as worker, console.phase("collect", total=len(tasks)) as progress:
        asyncio.run(collect_groups(tasks, store, config.collect, worker.collect_group, progress.advance))
    console.note(sentence("collected", collection_facts(list(store.trajectories()))))
    console.note(f"trajectories: {folder / 'collected'}")
