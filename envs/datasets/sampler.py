"""Which task comes when: the sequence for training, the held-out set, the tasks to collect on, and those trained on."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from configs.envs import EnvsConfig
from configs.learner import FileConfig, TeacherConfig
from configs.reward import CollectConfig
from configs.run import RunConfig
from envs.datasets.aime import load_aime, load_aime_without_leaks
from envs.datasets.benchmarks import names_its_form, stem_of
from envs.datasets.families import FAMILIES
from envs.datasets.generated import GeneratedTask, rl_task, sample_tasks, shared_out
from envs.datasets.own import NO_SOURCES, OWN, OwnSources, module_tasks, own_tasks
from envs.datasets.registry import load_tasks
from envs.datasets.split import Purpose, Split, TooFewTasksError, kept_with, question_key
from envs.leakage import write_leak_report
from envs.types import Task

BLOCK = 1000
"""Ordinals in which every data set comes exactly as often as its share says."""
EVALUATION_SEED_OFFSET = 1_000_000


class FixedShares:
    """The data set of each task by its ordinal, each exactly as often in a block as its share of `mix` says. Raises
    ValueError for a share that is too small to come once in a block."""

    def __init__(self, mix: Mapping[str, float], *, seed: int) -> None:
        self._quotas = {name: quota for name, quota in shared_out(mix, BLOCK).items() if mix[name] > 0}
        if missing := [name for name, quota in self._quotas.items() if quota == 0]:
            raise ValueError(
                f"the share of {missing[0]!r} is less than 1 in {BLOCK} tasks and would never be met; raise it, or "
                "leave it out"
            )
        self._seed = seed

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._quotas)

    def name(self, ordinal: int) -> str:
        block, place = divmod(ordinal, BLOCK)
        return self._block(block)[place]

    def num_before(self, ordinal: int) -> int:
        """How many lower ordinals are of the same data set."""
        block, place = divmod(ordinal, BLOCK)
        names = self._block(block)
        return block * self._quotas[names[place]] + names[:place].count(names[place])

    def _block(self, number: int) -> tuple[str, ...]:
        return _block(tuple(self._quotas.items()), self._seed, number)


class TaskSampler:
    """The endless sequence of training tasks: the same ordinal is the same task in every process, at the same cost.

    Generated families never run out; a data set from a file is gone through in shuffled rounds of its own, whatever
    else is in the mix: none of its tasks comes again before all have come. Raises ValueError as `FixedShares` and
    `load_tasks`.
    """

    def __init__(
        self, mix: Mapping[str, float], *, seed: int, path: Path | None = None, own: OwnSources = NO_SOURCES
    ) -> None:
        self._shares = FixedShares(mix, seed=seed)
        self._seed = seed
        self._own = own
        self._files = {
            name: load_tasks(name, split="train", count=None, seed=seed, path=path, own=own)
            for name in self._shares.names
            if name not in FAMILIES
        }
        if empty := [name for name, tasks in self._files.items() if not tasks]:
            raise ValueError(f"{empty[0]!r} has no task for training; add rows, or leave it out")

    def task(self, ordinal: int, family: str | None = None) -> Task:
        """`family`: the generated family that was chosen for this ordinal, or the data set that its share gives it, as
        with None."""
        name = family or self._shares.name(ordinal)
        if name in FAMILIES:
            return self._own.scored(rl_task(name, ordinal=ordinal, seed=self._seed).task)
        tasks = self._files[name]
        number, position = divmod(self._shares.num_before(ordinal), len(tasks))
        return tasks[_round(name, len(tasks), self._seed, number)[position]]


def training_tasks(config: RunConfig) -> TaskSampler:
    """Those of a recipe."""
    return TaskSampler(config.envs.mix, seed=config.seed, path=_path_of(config.envs), own=OwnSources.of(config))


def _path_of(envs: EnvsConfig) -> Path | None:
    return Path(envs.data_path) if envs.data_path else None


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


def held_out_tasks(
    mix: Mapping[str, float], *, count: int, seed: int, path: Path | None = None, own: OwnSources = NO_SOURCES
) -> list[Task]:
    """`count` evaluation tasks in the shares of `mix`, none of which can occur in training. Raises ValueError."""
    quotas = shared_out(mix, count)
    tasks = [own.scored(task) for task in _generated(quotas, split="eval", seed=seed)]
    for name, quota in quotas.items():
        if name not in FAMILIES:
            try:
                tasks += load_tasks(name, split="eval", count=quota, seed=seed, path=path, own=own)
            except TooFewTasksError as error:
                most = _most(mix, name, error.found, below=count)
                advice = [f"set evaluation.num_tasks={most}"] * (most > 0) + ["add rows"] * (path is not None)
                raise ValueError(f"{error}; {' or '.join(advice)}") from error
    return tasks


def _generated(quotas: Mapping[str, int], *, split: Split, seed: int, purpose: Purpose | None = None) -> list[Task]:
    """As many tasks of each generated family as its quota says."""
    families = {name: quota for name, quota in quotas.items() if quota and name in FAMILIES}
    if not families:
        return []
    drawn = sample_tasks(families, split=split, count=sum(families.values()), seed=seed, purpose=purpose)
    return [one.task for one in drawn]


def evaluation_tasks(config: RunConfig) -> list[Task]:
    """The held-out tasks of a recipe: another split than training's, and another seed besides. Raises ValueError."""
    return held_out_tasks(
        config.evaluation_mix,
        count=config.evaluation.num_tasks,
        seed=config.seed + EVALUATION_SEED_OFFSET,
        path=_path_of(config.envs),
        own=OwnSources.of(config),
    )


def _most(mix: Mapping[str, float], name: str, found: int, *, below: int) -> int:
    """The largest number of tasks, less than `below`, of which a data set with `found` tasks can give its share."""
    first = min(below - 1, int((found + 1) * sum(mix.values()) / mix[name]))
    return next(count for count in range(first, -1, -1) if shared_out(mix, count)[name] <= found)


def demonstration_tasks(mix: Mapping[str, float], *, count: int, seed: int) -> list[GeneratedTask]:
    """Training tasks whose plan is known; only generated families have one. None of their questions is one that RL ever
    asks: many demonstrations are wrong on purpose, and a policy that was shown a wrong answer to a question cannot be
    asked that question as if it were new."""
    generated = {name: share for name, share in mix.items() if share > 0 and name in FAMILIES}
    if not generated:
        raise ValueError(
            f"a cold start needs a generated family in envs.mix ({', '.join(FAMILIES)}), got {dict(mix)}; "
            "or set cold_start.num_demonstrations = 0"
        )
    return sample_tasks(generated, split="train", count=count, seed=seed, purpose="demonstrations")


def cold_start_tasks(config: RunConfig) -> list[GeneratedTask]:
    """The tasks that a recipe's demonstrations are played on, none that RL asks: with their plans, or for a teacher,
    then fewer where a data set has no more. None for demonstrations from a file. Raises ValueError."""
    settings, mix, seed = config.cold_start, config.envs.mix, config.seed
    if isinstance(settings, TeacherConfig):
        return _taught_tasks(mix, OwnSources.of(config), count=settings.num_demonstrations, seed=seed)
    if isinstance(settings, FileConfig) or not settings.num_demonstrations:
        return []
    return demonstration_tasks(mix, count=settings.num_demonstrations, seed=seed)


def _taught_tasks(mix: Mapping[str, float], own: OwnSources, *, count: int, seed: int) -> list[GeneratedTask]:
    found: list[GeneratedTask] = []
    for name, quota in shared_out(mix, count).items():
        if name in FAMILIES:
            drawn = sample_tasks({name: 1.0}, split="train", count=quota, seed=seed, purpose="demonstrations")
            found += (replace(one, task=own.scored(one.task)) for one in drawn)
        elif name in own.datasets:
            tasks = own.tasks(name, "demonstrations") if quota else []
            found += (GeneratedTask(task=task, plan=()) for task in _some(tasks, quota, seed))
        elif quota:
            raise ValueError(
                f"a teacher is given tasks of envs.datasets and of generated families, and envs.mix names {name!r}; "
                "name a source of your own for them, or use cold_start.type = 'file'"
            )
    return random.Random(f"demonstrations|{seed}").sample(found, len(found))


def collection_tasks(
    envs: EnvsConfig, collect: CollectConfig, *, seed: int, leak_report: Path | None, own: OwnSources = NO_SOURCES
) -> list[Task]:
    """`collect.num_tasks` training tasks in the shares of the mix, fewer where a data set has no more.

    Generated tasks are those that neither RL nor the demonstrations ever draw; tasks of a function of one's own those
    that RL does not. AIME problems that leak the evaluation's questions are dropped, and `leak_report`, where there is
    one, says which and why. Raises ValueError where a data set cannot be read.
    """
    path = _path_of(envs)
    quotas = {name: count for name, count in shared_out(envs.mix, collect.num_tasks).items() if count}
    tasks = _generated(quotas, split="train", seed=seed, purpose="prm")
    for name in (one for one in quotas if one not in FAMILIES):
        if name in own.datasets:
            found = own.tasks(name, "prm")
        elif name == "aime":
            found = _aime(path, leak_report)
        else:
            found = load_tasks(name, split="train", count=None, seed=seed, path=path, own=own)
        tasks += _some(found, quotas[name], seed)
    return [own.scored(task) for task in tasks]


def _aime(path: Path | None, leak_report: Path | None) -> list[Task]:
    questions = [task.question for task in load_aime(path, split="eval", whole_file=path is None)]
    tasks, checks = load_aime_without_leaks(path, test_questions=questions)
    if leak_report is not None:
        write_leak_report(leak_report, checks, questions)
    return tasks


def _some(tasks: list[Task], count: int, seed: int) -> list[Task]:
    return random.Random(f"collect|{seed}").sample(tasks, min(count, len(tasks)))


def never_trained_on(tasks: Iterable[Task], envs: EnvsConfig, *, with_teacher: bool = False) -> list[Task]:
    """The tasks that training on the mix of `envs` cannot meet, in their order. Generated families ask no question that
    anybody else asks. `with_teacher` changes nothing, but spares to load again what a run with a teacher has loaded.
    Raises ValueError and OSError as `load_tasks`."""
    names = [name for name, share in envs.mix.items() if share > 0 and name not in FAMILIES]
    met = {key for name in names for task in _met(name, envs, with_teacher) for key in (_key(task), _stem_key(task))}
    return [task for task in tasks if met.isdisjoint(_asked(task))]


def _met(name: str, envs: EnvsConfig, with_teacher: bool) -> list[Task]:
    """Of a source of one's own all that is not held out: RL asks some, a teacher shows some, a PRM learns from some."""
    if name in envs.datasets:
        found = module_tasks(name, envs.datasets[name], with_teacher)
        return [task for part, tasks in found.items() if part != "eval" for task in tasks]
    if name in OWN:
        return own_tasks(name, _path_of(envs))["train"]
    return load_tasks(name, split="train", count=None, seed=0, path=_path_of(envs))


def _asked(task: Task) -> set[str]:
    """The keys of a task that is held out. What a benchmark adds to a question is not in data of one's own."""
    return {_key(task), *([_stem_key(task)] if names_its_form(task.question) else [])}


def _stem_key(task: Task) -> str:
    return question_key(stem_of(kept_with(task).strip()))


def _key(task: Task) -> str:
    """The same for the same problem: a hand in whatever order, a question but for case, spacing and punctuation."""
    if task.dataset == "game24":
        return f"game24 {sorted(map(int, task.answer.split()))}"
    return question_key(kept_with(task))
