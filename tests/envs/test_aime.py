import csv
import json
import random
from string import ascii_lowercase

import pytest

from envs.datasets.benchmarks import load_aime
from envs.datasets.rows import local_rows
from envs.datasets.sampler import collection_tasks, load_tasks

COLUMNS = ["ID", "Year", "Problem Number", "Question", "Answer", "Part"]


def write_csv(path, *problems):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for id, answer, *question in problems:
            text = question[0] if question else f"Question {id},\nin two lines?"
            writer.writerow([id, id[:4], id.split("-")[-1], text, answer, ""])
    return path


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def url_row(part, number, answer):
    url = f"https://artofproblemsolving.com/wiki/index.php/2024_AIME_{part}_Problems/Problem_{number}"
    return {"id": 60, "problem": "How many?", "solution": "...", "answer": answer, "url": url}


def test_training_takes_the_years_before_2024_and_canonical_answers(tmp_path):
    path = write_csv(tmp_path / "a.csv", ("1983-1", "60"), ("2023-II-15", "073"), ("2024-I-1", "204"))
    tasks = load_aime(path, split="train", whole_file=False)
    assert [(task.id, task.answer) for task in tasks] == [("1983-1", "60"), ("2023-II-15", "73")]
    assert tasks[0].question == "Question 1983-1,\nin two lines?"
    assert {task.dataset for task in tasks} == {"aime"}


def test_the_problem_with_two_accepted_answers_is_left_out(tmp_path):
    path = write_csv(tmp_path / "a.csv", ("2022-II-8", "080 or 081 (both were accepted)"), ("2022-II-9", "000"))
    tasks = load_aime(path, split="train", whole_file=False)
    assert [(task.id, task.answer) for task in tasks] == [("2022-II-9", "0")]


@pytest.mark.parametrize("answer", ["", "1000", "-1", "3.0", "12 or 13", "12 ", "٣"])
def test_any_other_answer_than_three_digits_is_refused(tmp_path, answer):
    path = write_csv(tmp_path / "a.csv", ("2000-I-1", answer))
    with pytest.raises(ValueError):
        load_aime(path, split="train", whole_file=False)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_changed_count_is_refused(tmp_path, split):
    path = write_csv(tmp_path / "a.csv", ("1983-1", "60"), ("1983-2", "15"))
    with pytest.raises(ValueError):
        load_aime(path, split=split)


def test_the_id_comes_from_the_address_where_the_file_has_no_other(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", url_row("I", 1, "204"), url_row("II", 12, "023"))
    tasks = load_aime(path, split="eval", whole_file=False)
    assert [(task.id, task.answer) for task in tasks] == [("2024-I-1", "204"), ("2024-II-12", "23")]


@pytest.mark.parametrize(
    ("row", "split"),
    [
        ({"question": "?", "answer": "1"}, "train"),
        ({"ID": "I-1983-1", "Problem": "?", "Answer": 60}, "train"),
        ({"ID": "2024-I-1", "Problem": None, "Answer": 1}, "eval"),
        ({"ID": "2024-I-1", "Problem": "?", "Answer": None}, "eval"),
    ],
)
def test_unknown_columns_and_ids_are_refused(tmp_path, row, split):
    with pytest.raises(ValueError):
        load_aime(write_jsonl(tmp_path / "a.jsonl", row), split=split, whole_file=False)


def test_problems_that_leak_the_evaluation_are_dropped_for_rl_and_a_prm(tmp_path, monkeypatch):
    letters = random.Random(0)
    words = ["".join(letters.choices(ascii_lowercase, k=6)) for _ in range(30 * 946)]
    questions = [" ".join(words[start : start + 30]) for start in range(0, len(words), 30)]
    held_out = [(f"2024-I-{number}", "7", question) for number, question in enumerate(questions[916:], start=1)]
    trained = [held_out[0][2].upper(), f"$ {held_out[1][2]} $", *questions[:916]]
    rows = [(f"{1983 + index % 41}-{index // 41 + 1}", "7", question) for index, question in enumerate(trained)]
    path = write_csv(tmp_path / "aime.csv", *rows, *held_out, ("2022-II-8", "7"))
    monkeypatch.setattr("envs.datasets.benchmarks.public_rows", lambda source: local_rows(path))
    for tasks in (
        load_tasks("aime", split="train", count=None, seed=0),
        collection_tasks({"aime": 1.0}, count=918, seed=0),
    ):
        assert len(tasks) == 916
        assert not {task.id for task in tasks} & {rows[0][0], rows[1][0]}
