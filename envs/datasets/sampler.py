"""Tasks of a run by their use: training, evaluation, demonstrations and the trajectories of a PRM."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from configs.envs import EnvsConfig
from configs.learner import PlansConfig, TeacherConfig
from configs.rollout import PlannerAgentConfig
from configs.run import RunConfig
from envs.datasets.benchmarks import load_aime, names_its_form, stem_of
from envs.datasets.custom import NO_SOURCES, CustomSources
from envs.datasets.families import FAMILIES
from envs.datasets.game24 import generate_game24
from envs.datasets.generated import GeneratedTask, rl_task, sample_tasks, shared_out
from envs.datasets.rows import Purpose, Split, kept_with, question_key
from envs.leakage import find_leaks
from envs.types import Task

BUILT_IN = (*FAMILIES, "game24", "aime")
"""Names of data sets that need no table `envs.datasets.NAME`."""
DEFAULT_PLANS = 240
"""Scripted demonstrations where a recipe does not say how many."""
BLOCK = 1000
"""Number of consecutive ordinals in which each data set comes exactly as often as its share."""
EVALUATION_SEED_OFFSET = 1_000_000


def load_tasks(
    dataset: str, *, split: Split, count: int | None, seed: int, custom: CustomSources = NO_SOURCES
) -> list[Task]:
    """Return at most `count` different tasks of one split of a finite data set; the same for the same seed.

    "game24" is generated, and "aime" downloaded: its training problems without those that leak a held-out one. Raises
    ValueError, and OwnCodeError if the function of a custom data set fails.
    """
    if dataset == "game24":
        tasks = list(islice(generate_game24(split=split, seed=seed), count))
        return [custom.scored(task) for task in tasks]
    if dataset in custom.datasets:
        tasks = custom.tasks(dataset, split)
    elif dataset == "aime":
        tasks = load_aime(split=split)
        if split == "train":
            questions = [task.question for task in load_aime(split="eval")]
            leaks = set(find_leaks([(task.id, task.question) for task in tasks], questions))
            tasks = [task for task in tasks if task.id not in leaks]
    else:
        raise ValueError(f"unknown data set {dataset!r}; known data sets: {', '.join(BUILT_IN)}")
    count = len(tasks) if count is None else min(count, len(tasks))
    return [custom.scored(task) for task in random.Random(f"pick|{seed}").sample(tasks, count)]


class FixedShares:
    """The data set of each task by its ordinal: in each block as often as its share of `mix`.

    Raises ValueError for a share of less than one task in a block.
    """

    def __init__(self, mix: Mapping[str, float], *, seed: int) -> None:
        quotas = {name: quota for name, quota in shared_out(mix, BLOCK).items() if mix[name] > 0}
        if missing := [name for name, quota in quotas.items() if quota == 0]:
            raise ValueError(
                f"envs.mix: the share of {missing[0]!r} is less than 1 in {BLOCK} tasks, so none would be drawn; raise "
                "the share or remove the data set"
            )
        self.names = tuple(quotas)
        self._seed = seed
        self._block = [name for name, quota in quotas.items() for _ in range(quota)]

    def name(self, ordinal: int) -> str:
        return self._shuffled(ordinal // BLOCK)[ordinal % BLOCK]

    def num_before(self, ordinal: int) -> int:
        """Return the number of lower ordinals with the same data set."""
        number, place = divmod(ordinal, BLOCK)
        names = self._shuffled(number)
        return number * names.count(names[place]) + names[:place].count(names[place])

    def _shuffled(self, number: int) -> list[str]:
        return [self._block[place] for place in _order(BLOCK, f"block|{self._seed}|{number}")]


@lru_cache(maxsize=16)
def _order(size: int, key: str) -> list[int]:
    """Return the numbers below `size` in a random order that `key` decides."""
    order = list(range(size))
    random.Random(key).shuffle(order)
    return order


class TaskSampler:
    """The endless sequence of training tasks: an ordinal gives the same task in every process, at constant cost.

    A finite data set is drawn in shuffled rounds: no task repeats before all were drawn. Raises ValueError.
    """

    def __init__(self, mix: Mapping[str, float], *, seed: int, custom: CustomSources = NO_SOURCES) -> None:
        self._shares = FixedShares(mix, seed=seed)
        self._seed = seed
        self._custom = custom
        self._finite = {
            name: load_tasks(name, split="train", count=None, seed=seed, custom=custom)
            for name in self._shares.names
            if name not in FAMILIES
        }
        self.sizes = {name: len(tasks) for name, tasks in self._finite.items()}
        """Number of tasks of each finite data set."""
        if empty := [name for name, size in self.sizes.items() if not size]:
            raise ValueError(f"{empty[0]!r} has no task for training; add rows, or remove it from envs.mix")

    def task(self, ordinal: int) -> Task:
        """Return the task of an ordinal, from the data set that the shares give."""
        name = self._shares.name(ordinal)
        if name in FAMILIES:
            return self._custom.scored(rl_task(name, ordinal=ordinal, seed=self._seed).task)
        tasks = self._finite[name]
        number, position = divmod(self._shares.num_before(ordinal), len(tasks))
        return tasks[_order(len(tasks), f"round|{self._seed}|{name}|{number}")[position]]


def training_tasks(config: RunConfig) -> TaskSampler:
    """Return the training tasks of a recipe."""
    return TaskSampler(config.envs.mix, seed=config.seed, custom=CustomSources.of(config))


def held_out_tasks(
    mix: Mapping[str, float], *, count: int, seed: int, custom: CustomSources = NO_SOURCES
) -> list[Task]:
    """Return `count` evaluation tasks in the shares of `mix`, none of which can occur in training.

    They are fewer where a finite data set has no more. Raises ValueError if it has none.
    """
    quotas = shared_out(mix, count)
    tasks = [custom.scored(task) for task in _generated(quotas, split="eval", seed=seed)]
    for name, quota in quotas.items():
        if name not in FAMILIES and quota:
            found = load_tasks(name, split="eval", count=quota, seed=seed, custom=custom)
            if not found:
                raise ValueError(f"{name!r} has no held-out task; add rows, or leave it out of evaluation.mix")
            tasks += found
    return tasks


def _generated(quotas: Mapping[str, int], *, split: Split, seed: int, purpose: Purpose | None = None) -> list[Task]:
    families = {name: quota for name, quota in quotas.items() if quota and name in FAMILIES}
    if not families:
        return []
    generated = sample_tasks(families, split=split, count=sum(families.values()), seed=seed, purpose=purpose)
    return [drawn.task for drawn in generated]


def evaluation_tasks(config: RunConfig) -> list[Task]:
    """Return the held-out tasks of a recipe, drawn with another seed than training. Raises ValueError."""
    return held_out_tasks(
        config.evaluation_mix,
        count=config.evaluation.num_tasks,
        seed=config.seed + EVALUATION_SEED_OFFSET,
        custom=CustomSources.of(config),
    )


def demonstration_tasks(mix: Mapping[str, float], *, count: int, seed: int) -> list[GeneratedTask]:
    """Return training tasks with a known plan, which only generated families have; RL never asks their questions."""
    generated = {name: share for name, share in mix.items() if share > 0 and name in FAMILIES}
    if not generated:
        raise ValueError(
            f"a cold start needs a generated family in envs.mix ({', '.join(FAMILIES)}), got {dict(mix)}; "
            "or set cold_start.num_demonstrations = 0"
        )
    return sample_tasks(generated, split="train", count=count, seed=seed, purpose="demonstrations")


def num_plans(config: RunConfig) -> int:
    """Return how many scripted demonstrations a recipe makes."""
    settings = config.cold_start
    if not isinstance(settings, PlansConfig):
        return 0
    if settings.num_demonstrations is not None:
        return settings.num_demonstrations
    has_plans = any(share > 0 and name in FAMILIES for name, share in config.envs.mix.items())
    return DEFAULT_PLANS if has_plans and isinstance(config.agent, PlannerAgentConfig) else 0


def cold_start_tasks(config: RunConfig) -> list[GeneratedTask]:
    """Return the tasks of a recipe's demonstrations; RL asks none of them. Raises ValueError.

    Tasks for a teacher may have no plan, and are fewer where a data set has no more.
    """
    settings, mix, seed = config.cold_start, config.envs.mix, config.seed
    if isinstance(settings, TeacherConfig):
        return _teacher_tasks(mix, CustomSources.of(config), count=settings.num_demonstrations, seed=seed)
    count = num_plans(config)
    return demonstration_tasks(mix, count=count, seed=seed) if count else []


def _teacher_tasks(mix: Mapping[str, float], custom: CustomSources, *, count: int, seed: int) -> list[GeneratedTask]:
    drawn: list[GeneratedTask] = []
    for name, quota in shared_out(mix, count).items():
        if name in FAMILIES:
            generated = sample_tasks({name: 1.0}, split="train", count=quota, seed=seed, purpose="demonstrations")
            drawn += (replace(planned, task=custom.scored(planned.task)) for planned in generated)
        elif name in custom.datasets:
            tasks = custom.tasks(name, "demonstrations") if quota else []
            drawn += (GeneratedTask(task=task, plan=()) for task in _at_most(tasks, quota, seed))
        elif quota:
            raise ValueError(
                f"a teacher needs tasks of envs.datasets or of generated families, but envs.mix has {name!r}; "
                "make it a custom source, or use cold_start.type = 'file'"
            )
    return random.Random(f"demonstrations|{seed}").sample(drawn, len(drawn))


def collection_tasks(
    mix: Mapping[str, float], *, count: int, seed: int, custom: CustomSources = NO_SOURCES
) -> list[Task]:
    """Return `count` training tasks for a PRM in the shares of `mix`, fewer where a data set has no more.

    RL draws none of the generated tasks and none of custom sources. Raises ValueError.
    """
    quotas = {name: quota for name, quota in shared_out(mix, count).items() if quota}
    tasks = _generated(quotas, split="train", seed=seed, purpose="prm")
    for name in (name for name in quotas if name not in FAMILIES):
        if name in custom.datasets:
            available = custom.tasks(name, "prm")
        else:
            available = load_tasks(name, split="train", count=None, seed=seed, custom=custom)
        tasks += _at_most(available, quotas[name], seed)
    return [custom.scored(task) for task in tasks]


def _at_most(tasks: list[Task], count: int, seed: int) -> list[Task]:
    return random.Random(f"collect|{seed}").sample(tasks, min(count, len(tasks)))


def never_trained_on(tasks: Iterable[Task], envs: EnvsConfig) -> list[Task]:
    """Return the tasks that training on the mix of `envs` cannot ask, in their order. Raises as `load_tasks`.

    The questions of generated families are never equal to those of other data sets.
    """
    custom = CustomSources(datasets=envs.datasets)
    trained: list[Task] = []
    for name in (name for name, share in envs.mix.items() if share > 0 and name not in FAMILIES):
        if name in envs.datasets:
            # RL, a teacher or a PRM uses each part that is not held out.
            parts = custom.parts(name)
            trained += [task for part, tasks_of in parts.items() if part != "eval" for task in tasks_of]
        else:
            trained += load_tasks(name, split="train", count=None, seed=0, custom=custom)
    keys = {key for task in trained for key in (_task_key(task), _stem_key(task))}
    # Custom data does not have the options and the form of the answer that benchmarks add to a question.
    return [
        task
        for task in tasks
        if _task_key(task) not in keys and not (names_its_form(task.question) and _stem_key(task) in keys)
    ]


def _stem_key(task: Task) -> str:
    return question_key(stem_of(kept_with(task).strip()))


def _task_key(task: Task) -> str:
    """Return the same key for the same problem: a hand in any order, a question in any case or punctuation."""
    if task.dataset == "game24":
        return f"game24 {sorted(map(int, task.answer.split()))}"
    return question_key(kept_with(task))
