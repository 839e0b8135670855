import json
import re
from fractions import Fraction
from itertools import combinations_with_replacement

import pytest
from real_data import REAL_DATA, needs

from envs.datasets import game24
from envs.datasets.registry import load_tasks


def write_hands(path, *hands):
    rows = [{"id": f"hand-{i}", "numbers": hand, "answer": []} for i, hand in enumerate(hands)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("hand", [(1, 3, 4, 6), (3, 3, 8, 8), (1, 5, 5, 5), (4, 4, 10, 10), (13, 13, 2, 4)])
def test_solvable_hands_get_an_expression_that_makes_24(hand):
    expression = game24.solve(hand)
    assert sorted(map(int, re.findall(r"\d+", expression))) == sorted(hand)
    assert eval(re.sub(r"(\d+)", r"Fraction(\1)", expression), {"Fraction": Fraction}) == 24


@pytest.mark.parametrize("hand", [(1, 1, 1, 1), (13, 13, 13, 13), (1, 1, 1, 7)])
def test_hands_without_a_solution_get_none(hand):
    assert game24.solve(hand) is None


def test_the_number_of_solvable_hands_is_the_known_one():
    hands = combinations_with_replacement(range(1, 14), 4)
    assert sum(game24.solve(hand) is not None for hand in hands) == 1362


def test_generated_hands_are_distinct_solvable_and_deterministic():
    tasks = game24.generate_game24(split="train", count=100, seed=0)
    assert tasks == game24.generate_game24(split="train", count=100, seed=0)
    assert tasks != game24.generate_game24(split="train", count=100, seed=1)
    assert len({task.answer for task in tasks}) == 100
    assert all(game24.solve([int(n) for n in task.answer.split()]) for task in tasks)


def test_the_halves_share_no_hand_and_cover_all():
    train = {task.answer for task in game24.generate_game24(split="train", count=640, seed=0)}
    held_out = {task.answer for task in game24.generate_game24(split="eval", count=640, seed=0)}
    assert not train & held_out


def test_a_half_that_is_too_small_says_how_many_it_has():
    with pytest.raises(ValueError, match=r"1362 eval tasks of 'game24' were asked for, it has \d+"):
        game24.generate_game24(split="eval", count=1362, seed=0)


def test_a_task_names_its_numbers_and_hides_the_solution(tmp_path):
    [task] = game24.load_game24(write_hands(tmp_path / "hands.jsonl", [4, 9, 10, 13]))
    assert (task.id, task.dataset, task.answer) == ("hand-0", "game24", "4 9 10 13")
    assert "4, 9, 10, 13" in task.question
    assert "=" not in task.question


def test_a_file_may_begin_with_a_mark_of_byte_order_and_a_line_that_is_no_hand_is_named(tmp_path):
    path = write_hands(tmp_path / "hands.jsonl", [4, 9, 10, 13])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [task.answer for task in game24.load_game24(path)] == ["4 9 10 13"]
    path.write_text("[4, 9, 10, 13]\n")
    with pytest.raises(ValueError, match=r"hands\.jsonl, line 1 is no JSON object"):
        game24.load_game24(path)


def test_a_file_of_something_else_is_told_by_its_row(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "Who?", "answer": "you"}\n')
    with pytest.raises(
        ValueError, match=r"questions.jsonl, row 1: there is no list 'numbers', and 'game24' reads this"
    ):
        game24.load_game24(file)


def test_the_order_of_a_hand_does_not_change_its_half(tmp_path):
    path = write_hands(tmp_path / "hands.jsonl", [4, 9, 10, 13], [13, 10, 9, 4])
    sizes = [len(game24.of_split(game24.load_game24(path), split)) for split in ("train", "eval")]
    assert sorted(sizes) == [0, 2]


@pytest.mark.parametrize("hand", [[1, 2, 3], [1, 2, 3, 14], [0, 2, 3, 4], ["1", "2", "3", "4"]])
def test_a_malformed_hand_is_refused(tmp_path, hand):
    with pytest.raises(ValueError, match="hand-0: need 4 integers from 1 to 13"):
        game24.load_game24(write_hands(tmp_path / "hands.jsonl", hand))


def test_the_registry_holds_a_file_apart_by_the_same_halves(tmp_path):
    path = write_hands(tmp_path / "hands.jsonl", *([1, 1, n, m] for n in range(2, 8) for m in range(8, 13)))
    train = load_tasks("game24", split="train", count=8, seed=0, path=path)
    held_out = {task.answer for task in game24.generate_game24(split="eval", count=600, seed=0)}
    assert not {task.answer for task in train} & held_out
    with pytest.raises(ValueError, match=r"31 train tasks of 'game24' were asked for, it has \d+"):
        load_tasks("game24", split="train", count=31, seed=0, path=path)


def publish(monkeypatch, rows):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda name, *, split: rows)


def test_the_public_data_set_gives_its_solvable_hands(monkeypatch):
    hands = list(combinations_with_replacement(range(1, 14), 4))[: game24.PUBLIC_COUNT]
    rows = [{"numbers": list(hand), "solvable": True} for hand in hands]
    publish(monkeypatch, [{"numbers": [1, 1, 1, 1], "solvable": False}, *rows])
    tasks = load_tasks("nlile/24-game", split="eval", count=100, seed=0)
    assert len({task.id for task in tasks}) == 100
    assert game24.of_split(tasks, "eval") == tasks


def test_a_changed_public_data_set_is_refused(monkeypatch):
    publish(monkeypatch, [{"numbers": [1, 1, 1, 8], "solvable": True}])
    with pytest.raises(ValueError, match="nlile/24-game changed: expected 1362 hands, found 1"):
        game24.load_game24()


@needs("gameof24.jsonl")
def test_every_hand_of_the_real_file_is_solvable():
    tasks = game24.load_game24(REAL_DATA / "gameof24.jsonl")
    assert len(tasks) == len({task.answer for task in tasks}) == 300
    assert all(game24.solve([int(n) for n in task.answer.split()]) for task in tasks)
