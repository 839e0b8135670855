import json
from itertools import combinations_with_replacement

import pytest

from envs.datasets import game24
from envs.datasets.sampler import load_tasks


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


def test_the_halves_share_no_hand_and_hold_all():
    halves = [{task.answer for task in game24.generate_game24(split=split, seed=0)} for split in ("train", "eval")]
    assert not halves[0] & halves[1]
    assert len(halves[0] | halves[1]) == 1362
    train = load_tasks("game24", split="train", count=8, seed=0)
    assert len({task.answer for task in train} & halves[0]) == 8
