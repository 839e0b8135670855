"""Generated tasks: endless, deterministic, with the plan that solves each and plans that fail it."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from envs.datasets.catalogue import build_catalogue
from envs.datasets.families import FAMILIES, PlanStep
from envs.datasets.split import SPLITS, Split, split_of
from envs.datasets.wrong_plans import wrong_steps
from envs.types import Task

__all__ = ["FAMILIES", "GeneratedTask", "PlanStep", "generate", "sample_tasks", "wrong_plan"]

_MAX_DRAWS_PER_TASK = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTask:
    """A task and the tool calls that solve it; the last step gives the answer."""

    task: Task
    plan: tuple[PlanStep, ...]


def generate(family: str, *, split: Split, index: int, seed: int) -> GeneratedTask:
    """The `index`-th task of a family: the same arguments give the same task in every process."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; known families: {', '.join(FAMILIES)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known splits: {', '.join(SPLITS)}")
    # A string seeds through its SHA-512: the sequences of (seed=0, index=1) and (seed=1, index=0) are
    # unrelated, which a sum of both would not give.
    rng = random.Random(f"{family}|{split}|{seed}|{index}")
    items = build_catalogue().items_of(split)
    problem = FAMILIES[family](rng, items)
    while any(split_of(key) != split for key in problem.keys):
        problem = FAMILIES[family](rng, items)
    task = Task(
        id=f"{family}-{split}-{seed}-{index}",
        dataset=family,
        question=problem.question,
        answer=str(problem.answer),
    )
    return GeneratedTask(task=task, plan=problem.plan)


def sample_tasks(mix: Mapping[str, float], *, split: Split, count: int, seed: int) -> list[GeneratedTask]:
    """`count` tasks in shuffled order, shared out by the weights of `mix`, no question twice."""
    quotas = _quotas(mix, count)
    seen: set[str] = set()
    tasks = [
        generated
        for family, quota in quotas.items()
        for generated in _distinct(family, split=split, count=quota, seed=seed, seen=seen)
    ]
    random.Random(f"order|{split}|{seed}").shuffle(tasks)
    return tasks


def wrong_plan(generated: GeneratedTask, rng: random.Random) -> tuple[PlanStep, ...]:
    """A plausible plan with a wrong answer: a guess, a wrong operator, no search, or an early stop."""
    return wrong_steps(generated.plan, rng)


def _quotas(mix: Mapping[str, float], count: int) -> dict[str, int]:
    """Whole shares that add up to `count`: largest remainder, ties to the family named first."""
    total = sum(mix.values())
    if count < 0 or total <= 0 or min(mix.values()) < 0:
        raise ValueError(f"need count >= 0 and weights >= 0 with a positive sum, got {count} and {dict(mix)}")
    exact = {family: count * weight / total for family, weight in mix.items()}
    quotas = {family: int(share) for family, share in exact.items()}
    by_remainder = sorted(exact, key=lambda family: quotas[family] - exact[family])
    for family in by_remainder[: count - sum(quotas.values())]:
        quotas[family] += 1
    return quotas


def _distinct(family: str, *, split: Split, count: int, seed: int, seen: set[str]) -> Iterator[GeneratedTask]:
    found = 0
    for index in range(count * _MAX_DRAWS_PER_TASK):
        if found == count:
            return
        generated = generate(family, split=split, index=index, seed=seed)
        if generated.task.question not in seen:
            seen.add(generated.task.question)
            found += 1
            yield generated
    if found < count:
        raise ValueError(f"{family!r} has too few questions: wanted {count} distinct ones, found {found}")
