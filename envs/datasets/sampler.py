"""Which task comes when: a fixed sequence for training, a fixed held-out set for evaluation."""

import random
from collections.abc import Mapping
from pathlib import Path

from envs.datasets.families import FAMILIES
from envs.datasets.generated import GeneratedTask, generate, sample_tasks
from envs.datasets.registry import load_tasks
from envs.types import Task

# Far from the seeds of RL itself, of the PRM (+500,000) and of the evaluation (+1,000,000).
DEMONSTRATION_SEED_OFFSET = 250_000


class TaskSampler:
    """The endless sequence of training tasks: the same ordinal is the same task in every process.

    Generated families never run out; a data set from a file is gone through in shuffled rounds.
    """

    def __init__(self, mix: Mapping[str, float], *, seed: int, path: Path | None = None) -> None:
        self._names = [name for name, share in mix.items() if share > 0]
        self._shares = [mix[name] for name in self._names]
        self._seed = seed
        self._files = {
            name: load_tasks(name, split="train", count=None, seed=seed, path=path)
            for name in self._names
            if name not in FAMILIES
        }

    def task(self, ordinal: int) -> Task:
        rng = random.Random(f"task|{self._seed}|{ordinal}")
        name = rng.choices(self._names, self._shares)[0]
        if name in FAMILIES:
            return generate(name, split="train", index=ordinal, seed=self._seed).task
        tasks = self._files[name]
        order = list(range(len(tasks)))
        random.Random(f"round|{self._seed}|{name}|{ordinal // len(tasks)}").shuffle(order)
        return tasks[order[ordinal % len(tasks)]]


def held_out_tasks(mix: Mapping[str, float], *, count: int, seed: int, path: Path | None = None) -> list[Task]:
    """`count` evaluation tasks in the shares of `mix`, none of which can occur in training."""
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
            tasks += load_tasks(name, split="eval", count=round(count * share / total), seed=seed, path=path)
    return tasks


def demonstration_tasks(mix: Mapping[str, float], *, count: int, seed: int) -> list[GeneratedTask]:
    """Training tasks whose plan is known, for the cold start; only generated families have one.

    They come from another seed than RL's: most demonstrations are wrong on purpose, and a policy that was shown a wrong
    answer to a question cannot be asked that question as if it were new.
    """
    generated = {name: share for name, share in mix.items() if name in FAMILIES}
    if not generated:
        raise ValueError(
            f"a cold start needs a generated family in envs.mix ({', '.join(FAMILIES)}), got {dict(mix)}; "
            "or set cold_start.num_demonstrations = 0"
        )
    return sample_tasks(generated, split="train", count=count, seed=seed + DEMONSTRATION_SEED_OFFSET)
