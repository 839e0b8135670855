"""The data sets by name."""

import random
from pathlib import Path

from envs.datasets import game24
from envs.datasets.aime import load_aime, load_aime_without_leaks
from envs.datasets.families import FAMILIES
from envs.datasets.generated import sample_tasks
from envs.datasets.own import NO_SOURCES, OWN, OwnSources, load_own
from envs.datasets.split import Split, TooFewTasksError
from envs.types import Task

BUILT_IN = (*FAMILIES, "game24", game24.PUBLIC_ID, "aime", *OWN)


def load_tasks(
    dataset: str,
    *,
    split: Split,
    count: int | None,
    seed: int,
    path: Path | None = None,
    own: OwnSources = NO_SOURCES,
) -> list[Task]:
    """`count` different tasks of one split, the same for the same arguments; None asks for all of them.

    `path` is a local file for "game24" (generated without one), "aime" (downloaded without one) and the data sets of
    one's own, which need it. `own` are the recipe's own, besides. Raises TooFewTasksError, ValueError for what is no
    data set, and OwnCodeError.
    """
    if dataset in FAMILIES:
        if path is not None:
            raise ValueError(f"{dataset!r} is generated and reads no file, got path={str(path)!r}")
        if count is None:
            raise ValueError(f"{dataset!r} is endless: say how many tasks are wanted")
        drawn = sample_tasks({dataset: 1.0}, split=split, count=count, seed=seed)
        return [own.scored(generated.task) for generated in drawn]
    if dataset == "game24" and path is None:
        tasks = game24.generate_game24(split=split, count=count, seed=seed)
    else:
        tasks = _all_tasks(dataset, split, path, own)
        count = len(tasks) if count is None else count
        if count > len(tasks):
            raise TooFewTasksError(dataset, split, wanted=count, found=len(tasks))
        tasks = random.Random(f"pick|{seed}").sample(tasks, count)
    return [own.scored(task) for task in tasks]


def _all_tasks(dataset: str, split: Split, path: Path | None, own: OwnSources) -> list[Task]:
    if dataset in own.datasets:
        return own.tasks(dataset, split)
    if dataset in OWN:
        # A scorer of one's own reads an answer as it is written.
        return load_own(dataset, path, split=split, as_written=own.scorer is not None)
    if dataset == "aime" and split == "eval":
        return load_aime(path, split="eval")
    if dataset == "aime":
        # A local file may hold the training problems alone.
        asked = [task.question for task in load_aime(path, split="eval", whole_file=path is None)]
        return load_aime_without_leaks(path, test_questions=asked)[0]
    if dataset not in ("game24", game24.PUBLIC_ID):
        raise ValueError(f"unknown data set {dataset!r}; known data sets: {', '.join(BUILT_IN)}")
    if dataset == game24.PUBLIC_ID and path is not None:
        raise ValueError(f"{game24.PUBLIC_ID!r} is downloaded; a local file is read as 'game24'")
    return game24.of_split(game24.load_game24(path), split)
