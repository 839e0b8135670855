import csv
import json
import random
from itertools import combinations_with_replacement
from string import ascii_lowercase

import pytest

from configs.run import RunConfig
from envs.datasets.custom import CustomSources
from envs.datasets.rows import question_key
from envs.datasets.sampler import TaskSampler, collection_tasks, demonstration_tasks, evaluation_tasks, load_tasks

MIX = {"lookup": 0.6, "two_lookup": 0.4}


@pytest.fixture(scope="module")
def hands(tmp_path_factory):
    """Return a file of Game of 24 with 400 of its 1,820 hands."""
    path = tmp_path_factory.mktemp("game24") / "hands.jsonl"
    drawn = random.Random(0).sample(list(combinations_with_replacement(range(1, 14), 4)), 400)
    path.write_text("".join(json.dumps({"id": f"h{n}", "numbers": hand}) + "\n" for n, hand in enumerate(drawn)))
    return path


def collect(*, mix=MIX, data_path=None, seed=0, num_tasks=100):
    return collection_tasks(mix, count=num_tasks, seed=seed, custom=CustomSources(path=data_path))


# Generated tasks.


@pytest.mark.parametrize("seed", [0, 7])
def test_no_task_is_one_of_the_runs_training_tasks(seed):
    sampler = TaskSampler(MIX, seed=seed)
    trained_on = [sampler.task(ordinal) for ordinal in range(10_000)]
    trained_on += [one.task for one in demonstration_tasks(MIX, count=300, seed=seed)]
    tasks = collect(seed=seed, num_tasks=300)
    assert not {task.id for task in tasks} & {task.id for task in trained_on}
    assert not {question_key(task.question) for task in tasks} & {question_key(task.question) for task in trained_on}


@pytest.mark.parametrize("seed", [0, 7])
def test_no_question_is_one_of_the_evaluation(hands, seed):
    mix = {**MIX, "game24": 0.5}
    run = RunConfig(seed=seed, envs={"mix": mix, "data_path": str(hands)}, evaluation={"num_tasks": 300})
    asked = {task.question for task in evaluation_tasks(run)}
    tasks = collect(mix=mix, data_path=hands, seed=seed, num_tasks=300)
    assert (len(asked), len(tasks)) == (300, 300)
    assert not {task.question for task in tasks} & asked


# AIME.


def question(rng):
    """Thirty words that no other question has."""
    return " ".join("".join(rng.choices(ascii_lowercase, k=6)) for _ in range(30)) + "."


def public_rows(*, leaking=()):
    """Return rows with the number and years of the public training file before 2024, with the questions `leaking`."""
    rng = random.Random(0)
    questions = [*leaking, *(question(rng) for _ in range(918 - len(leaking)))]
    return [(f"{1983 + index % 41}-{index // 41 + 1}", text) for index, text in enumerate(questions)]


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ID", "Problem", "Answer"])
        writer.writerows([id, text, "7"] for id, text in rows)
    return path


def evaluation_rows():
    rng = random.Random(1)
    return [(f"2024-I-{index}", question(rng)) for index in range(1, 31)]


def test_aime_problems_that_leak_the_evaluation_are_dropped_for_rl_and_a_prm(tmp_path):
    test_rows = evaluation_rows()
    (_, first), (_, second), *_ = test_rows
    rows = public_rows(leaking=[first.upper(), f"$ {second} $"])
    path = write_csv(tmp_path / "aime.csv", [*rows, *test_rows, ("2022-II-8", question(random.Random(2)))])
    trained = load_tasks("aime", split="train", count=None, seed=0, custom=CustomSources(path=path))
    for tasks in (trained, collect(mix={"aime": 1.0}, data_path=path, num_tasks=918)):
        assert len(tasks) == 916
        assert not {task.id for task in tasks} & {rows[0][0], rows[1][0]}
