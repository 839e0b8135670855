"""Who meets which task: demonstrations, RL, the PRM and the evaluation have none in common."""

import json
import random
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from itertools import combinations, combinations_with_replacement
from pathlib import Path

from benchmarks.promised.promise import Measured, Promise
from configs.loading import load_run_config
from envs.datasets.game24 import MAX_NUMBER
from envs.datasets.own import own_tasks
from envs.datasets.sampler import TaskSampler, cold_start_tasks, collection_tasks, evaluation_tasks
from envs.datasets.split import question_key
from envs.types import Task
from ray_jobs.evaluate import EvaluationRequest, evaluation_items

WITH_PRM = Path(__file__).parents[2] / "configs" / "recipes" / "prm_cpu.toml"
NUM_RL_TASKS = 10_000
"""A hundred times what the recipe draws."""
NUM_OWN = 200


def _disjoint(seed: int) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = _shared_by_the_recipe(seed, folder)
        with redirect_stdout(StringIO()):
            hands = _hands_met_twice(seed, folder)
        parted = _near_duplicates_apart(seed, folder / "own.jsonl")
    text = (
        f"ids and questions that two purposes of prm_cpu share: {shared}; hands of Game of 24 both trained and "
        f"evaluated on: {hands}; near-duplicates of one's own on both sides: {parted} of {NUM_OWN}"
    )
    return Measured(text, holds=shared == hands == parted == 0)


def _shared_by_the_recipe(seed: int, folder: Path) -> int:
    config = load_run_config(WITH_PRM, [f"seed={seed}"])
    sampler = TaskSampler(config.envs.mix, seed=seed)
    drawn: list[list[Task]] = [
        [one.task for one in cold_start_tasks(config)],
        [sampler.task(ordinal) for ordinal in range(NUM_RL_TASKS)],
        collection_tasks(config.envs, config.collect, seed=seed, leak_report=folder / "leaks.json"),
        evaluation_tasks(config),
    ]
    names = [{task.id for task in tasks} | {question_key(task.question) for task in tasks} for tasks in drawn]
    return sum(len(one & other) for one, other in combinations(names, 2))


def _hands_met_twice(seed: int, folder: Path) -> int:
    """Of a benchmark's hands, each in some order, those that RL draws and that are evaluated on all the same."""
    rng = random.Random(seed)
    hands = rng.sample(list(combinations_with_replacement(range(1, MAX_NUMBER + 1), 4)), 300)
    rows = ({"id": f"hand-{number}", "numbers": rng.sample(hand, len(hand))} for number, hand in enumerate(hands))
    _write(folder / "gameof24.jsonl", rows)
    config = load_run_config(None, ["envs.mix={game24=0.5, lookup=0.5}", f"seed={seed}"])
    sampler = TaskSampler(config.envs.mix, seed=seed)
    met = {tuple(sorted(task.answer.split())) for task in map(sampler.task, range(3000)) if task.dataset == "game24"}
    asked = evaluation_items(config, EvaluationRequest(benchmarks=("game24",), data=folder, whole=False))
    return sum(tuple(sorted(task.answer.split())) in met for task in asked)


def _near_duplicates_apart(seed: int, path: Path) -> int:
    """Each question again in other case, spacing and punctuation; how many pairs are parted by the halves."""
    rng = random.Random(seed)
    rows = []
    for number in range(NUM_OWN):
        words = ["How", "many", *("".join(rng.choices("abcdefgh", k=5)) for _ in range(5))]
        again = rng.choice((" ", "  ")).join(rng.choice((str.upper, str.lower))(word) for word in words)
        for variant, question in (("a", " ".join(words) + "?"), ("b", again + rng.choice((" ?", "", " ...")))):
            rows.append({"id": f"{number}-{variant}", "question": question, "answer": "1"})
    _write(path, rows)
    halves = [{task.id.split("-")[1] for task in tasks} for tasks in own_tasks("own_text", path).values()]
    return len(set.intersection(*halves)) if all(halves) else NUM_OWN


def _write(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


PROMISES = [
    Promise(
        name="disjoint-tasks",
        said="Demonstrations, RL, the PRM and the evaluation share no task and no question",
        where="docs/invariants.md",
        measure=_disjoint,
    ),
]
