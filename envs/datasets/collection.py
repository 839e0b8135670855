"""The tasks that trajectories are collected on, to train a PRM with: of the training split, checked for leaks."""

import random
from pathlib import Path

from configs.envs import EnvsConfig
from configs.reward import CollectConfig
from envs.datasets.aime import load_aime, load_aime_without_leaks
from envs.datasets.families import FAMILIES
from envs.datasets.generated import sample_tasks, shared_out
from envs.datasets.registry import load_tasks
from envs.leakage import write_leak_report
from envs.types import Task


def collection_tasks(envs: EnvsConfig, collect: CollectConfig, *, seed: int, leak_report: Path) -> list[Task]:
    """`collect.num_tasks` training tasks in the shares of the mix, fewer where a data set has no more.

    Generated tasks are those that neither RL nor the demonstrations ever draw. AIME problems that leak the evaluation's
    questions are dropped, and `leak_report` says which and why. Raises ValueError where a data set cannot be read.
    """
    path = Path(envs.data_path) if envs.data_path else None
    quotas = {name: count for name, count in shared_out(envs.mix, collect.num_tasks).items() if count}
    generated = {name: count for name, count in quotas.items() if name in FAMILIES}
    tasks = []
    if generated:
        drawn = sample_tasks(generated, split="train", count=sum(generated.values()), seed=seed, purpose="prm")
        tasks = [one.task for one in drawn]
    for name in quotas.keys() - generated.keys():
        found = _aime(path, collect, leak_report) if name == "aime" else _others(name, path, seed)
        tasks += _some(found, quotas[name], seed)
    return tasks


def _aime(path: Path | None, collect: CollectConfig, leak_report: Path) -> list[Task]:
    test_path = Path(collect.aime_test_path) if collect.aime_test_path else path
    whole = collect.aime_test_path is not None or path is None
    questions = [task.question for task in load_aime(test_path, split="eval", whole_file=whole)]
    tasks, checks = load_aime_without_leaks(path, test_questions=questions)
    write_leak_report(leak_report, checks, questions)
    return tasks


def _others(name: str, path: Path | None, seed: int) -> list[Task]:
    return load_tasks(name, split="train", count=None, seed=seed, path=path)


def _some(tasks: list[Task], count: int, seed: int) -> list[Task]:
    return random.Random(f"collect|{seed}").sample(tasks, min(count, len(tasks)))
