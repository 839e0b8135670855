import json
from itertools import combinations_with_replacement

import pytest

from envs.datasets import game24
from envs.datasets.custom import CustomSources
from envs.datasets.sampler import held_out_tasks, load_tasks


def write_hands(path, *hands):
    rows = [{"id": f"hand-{i}", "numbers": hand, "answer": []} for i, hand in enumerate(hands)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_number_of_solvable_hands_is_the_known_one():
    hands = combinations_with_replacement(range(1, 14), 4)
    assert sum(map(game24.is_solvable, hands)) == 1362
    assert game24.is_solvable((8, 3, 8, 3))  # in any order, and through a fraction: 8 / (3 - 8 / 3)


def test_a_task_names_its_numbers_and_hides_the_solution(tmp_path):
    [task] = game24.load_game24(write_hands(tmp_path / "hands.jsonl", [4, 9, 10, 13]))
    assert (task.id, task.dataset, task.answer) == ("hand-0", "game24", "4 9 10 13")
    assert "4, 9, 10, 13" in task.question
    assert "=" not in task.question


@pytest.mark.parametrize("hand", [None, [1, 2, 3], [1, 2, 3, 14], [0, 2, 3, 4], ["1", "2", "3", "4"]])
def test_a_malformed_hand_is_refused_with_its_file(tmp_path, hand):
    with pytest.raises(ValueError, match=r"hands\.jsonl"):
        game24.load_game24(write_hands(tmp_path / "hands.jsonl", hand))


def test_the_registry_holds_a_file_apart_by_the_same_halves(tmp_path):
    path = write_hands(tmp_path / "hands.jsonl", *([1, 1, n, m] for n in range(2, 8) for m in range(8, 13)))
    train = load_tasks("game24", split="train", count=8, seed=0, custom=CustomSources(path=path))
    held_out = {task.answer for task in game24.generate_game24(split="eval", seed=0)}
    assert not {task.answer for task in train} & held_out
    trained = load_tasks("game24", split="train", count=31, seed=0, custom=CustomSources(path=path))
    assert len(trained) < 31
    write_hands(path, *(list(map(int, task.answer.split())) for task in trained))
    with pytest.raises(ValueError, match="game24"):
        held_out_tasks({"game24": 1.0}, count=5, seed=0, custom=CustomSources(path=path))
