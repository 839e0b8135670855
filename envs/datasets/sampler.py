"""Which task comes when: a fixed sequence for training, a fixed held-out set for evaluation."""

import random
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from envs.datasets.families import FAMILIES
from envs.datasets.generated import GeneratedTask, rl_task, sample_tasks, shared_out
from envs.datasets.registry import load_tasks
from envs.datasets.split import TooFewTasksError
from envs.types import Task

BLOCK = 1000
"""Ordinals in which every data set comes exactly as often as its share says."""


class TaskSampler:
    """The endless sequence of training tasks: the same ordinal is the same task in every process, at the same cost.

    Generated families never run out; a data set from a file is gone through in shuffled rounds of its own, whatever
    else is in the mix: none of its tasks comes again before all have come. Raises ValueError for a share that is too
    small to come once in a block, and as `load_tasks`.
    """

    def __init__(self, mix: Mapping[str, float], *, seed: int, path: Path | None = None) -> None:
        self._quotas = {name: quota for name, quota in shared_out(mix, BLOCK).items() if mix[name] > 0}
        if missing := [name for name, quota in self._quotas.items() if quota == 0]:
            raise ValueError(
                f"the share of {missing[0]!r} is less than 1 in {BLOCK} tasks and would never be met; raise it, or "
                "leave it out"
            )
        self._seed = seed
        self._files = {
            name: load_tasks(name, split="train", count=None, seed=seed, path=path)
            for name in self._quotas
            if name not in FAMILIES
        }
        if empty := [name for name, tasks in self._files.items() if not tasks]:
            raise ValueError(f"{empty[0]!r} has no task for training; add rows, or leave it out")

    def task(self, ordinal: int) -> Task:
        block, place = divmod(ordinal, BLOCK)
        names = _block(tuple(self._quotas.items()), self._seed, block)
        name = names[place]
        if name in FAMILIES:
            return rl_task(name, ordinal=ordinal, seed=self._seed).task
        tasks = self._files[name]
        draws_before = block * self._quotas[name] + names[:place].count(name)
        number, position = divmod(draws_before, len(tasks))
        return tasks[_round(name, len(tasks), self._seed, number)[position]]


@lru_cache(maxsize=2)
def _block(quotas: tuple[tuple[str, int], ...], seed: int, number: int) -> tuple[str, ...]:
    """The data set of each ordinal of a block."""
    names = [name for name, quota in quotas for _ in range(quota)]
    random.Random(f"block|{seed}|{number}").shuffle(names)
    return tuple(names)


@lru_cache(maxsize=16)
def _round(name: str, size: int, seed: int, number: int) -> tuple[int, ...]:
    """The order of a data set's tasks in one round."""
    order = list(range(size))
    random.Random(f"round|{seed}|{name}|{number}").shuffle(order)
    return tuple(order)


def held_out_tasks(mix: Mapping[str, float], *, count: int, seed: int, path: Path | None = None) -> list[Task]:
    """`count` evaluation tasks in the shares of `mix`, none of which can occur in training. Raises ValueError."""
    generated = {name: share for name, share in mix.items() if name in FAMILIES}
    total = sum(mix.values())
    num_generated = round(count * sum(generated.values()) / total)
    tasks = (
        [one.task for one in sample_tasks(generated, split="eval", count=num_generated, seed=seed)]
        if num_generated
        else []
    )
    for name, share in mix.items():
        if name not in FAMILIES:
            try:
                tasks += load_tasks(name, split="eval", count=round(count * share / total), seed=seed, path=path)
            except TooFewTasksError as error:
                most = _most(error.found, share / total)
                advice = [f"set evaluation.num_tasks={most}"] * (most > 0) + ["add rows"] * (path is not None)
                raise ValueError(f"{error}; {' or '.join(advice)}") from error
    return tasks


def _most(found: int, share: float) -> int:
    """The largest number of tasks in all of which a data set with `found` tasks can give its share."""
    return next(count for count in range(int((found + 0.5) / share), -1, -1) if round(count * share) <= found)


def demonstration_tasks(mix: Mapping[str, float], *, count: int, seed: int) -> list[GeneratedTask]:
    """Training tasks whose plan is known, for the cold start; only generated families have one.

    None of their questions is one that RL ever asks: most demonstrations are wrong on purpose, and a policy that was
    shown a wrong answer to a question cannot be asked that question as if it were new.
    """
    generated = {name: share for name, share in mix.items() if name in FAMILIES}
    if not generated:
        raise ValueError(
            f"a cold start needs a generated family in envs.mix ({', '.join(FAMILIES)}), got {dict(mix)}; "
            "or set cold_start.num_demonstrations = 0"
        )
    return sample_tasks(generated, split="train", count=count, seed=seed, purpose="demonstrations")
