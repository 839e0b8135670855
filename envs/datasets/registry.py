"""The data sets by name."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from envs.datasets import game24
from envs.datasets.aime import load_aime, load_aime_without_leaks
from envs.datasets.families import FAMILIES
from envs.datasets.generated import sample_tasks
from envs.datasets.module import NO_SOURCES, OwnSources
from envs.datasets.own import OWN, load_own
from envs.datasets.split import Split, TooFewTasksError
from envs.types import Task

LoadTasks = Callable[..., list[Task]]


def load_tasks(
    dataset: str,
    *,
    split: Split,
    count: int | None,
    seed: int,
    path: str | Path | None = None,
    own: OwnSources = NO_SOURCES,
) -> list[Task]:
    """`count` different tasks of one split, the same for the same arguments; None asks for all of them.

    `path` is a local file for "game24" (generated without one), "aime" (downloaded without one) and the data sets of
    one's own, which need it. `own` are the recipe's own, besides. Raises TooFewTasksError, ValueError for what is no
    data set, and OwnCodeError.
    """
    if dataset in own.datasets:
        return _pick(dataset, own.tasks(dataset, split), split, count, seed)
    if dataset not in LOADERS:
        raise ValueError(f"unknown data set {dataset!r}; known data sets: {', '.join(LOADERS)}")
    # A scorer of one's own reads an answer as it is written.
    load = partial(LOADERS[dataset], as_written=True) if dataset in OWN and own.scorer else LOADERS[dataset]
    tasks = load(split, count, seed, Path(path) if path is not None else None)
    return [own.scored(task) for task in tasks]


def _load_family(family: str, split: Split, count: int | None, seed: int, path: Path | None) -> list[Task]:
    if path is not None:
        raise ValueError(f"{family!r} is generated and reads no file, got path={str(path)!r}")
    if count is None:
        raise ValueError(f"{family!r} is endless: say how many tasks are wanted")
    return [generated.task for generated in sample_tasks({family: 1.0}, split=split, count=count, seed=seed)]


def _load_game24(split: Split, count: int | None, seed: int, path: Path | None) -> list[Task]:
    if path is None:
        return game24.generate_game24(split=split, count=count, seed=seed)
    return _pick("game24", game24.of_split(game24.load_game24(path), split), split, count, seed)


def _load_public_game24(split: Split, count: int | None, seed: int, path: Path | None) -> list[Task]:
    if path is not None:
        raise ValueError(f"{game24.PUBLIC_ID!r} is downloaded; a local file is read as 'game24'")
    return _pick(game24.PUBLIC_ID, game24.of_split(game24.load_game24(), split), split, count, seed)


def _load_aime(split: Split, count: int | None, seed: int, path: Path | None) -> list[Task]:
    if split == "eval":
        return _pick("aime", load_aime(path, split="eval"), split, count, seed)
    # A local file may hold the training problems alone.
    asked = [task.question for task in load_aime(path, split="eval", whole_file=path is None)]
    tasks, _ = load_aime_without_leaks(path, test_questions=asked)
    return _pick("aime", tasks, split, count, seed)


def _load_own(
    dataset: str, split: Split, count: int | None, seed: int, path: Path | None, as_written: bool = False
) -> list[Task]:
    return _pick(dataset, load_own(dataset, path, split=split, as_written=as_written), split, count, seed)


def _pick(dataset: str, tasks: list[Task], split: Split, count: int | None, seed: int) -> list[Task]:
    count = len(tasks) if count is None else count
    if count > len(tasks):
        raise TooFewTasksError(dataset, split, wanted=count, found=len(tasks))
    return random.Random(f"pick|{seed}").sample(tasks, count)


LOADERS: dict[str, LoadTasks] = {
    **{family: partial(_load_family, family) for family in FAMILIES},
    "game24": _load_game24,
    game24.PUBLIC_ID: _load_public_game24,
    "aime": _load_aime,
    **{dataset: partial(_load_own, dataset) for dataset in OWN},
}
