import csv
import json

import pytest
from real_data import REAL_DATA, needs

from envs.datasets.benchmarks import load_aime

COLUMNS = ["ID", "Year", "Problem Number", "Question", "Answer", "Part"]


def write_csv(path, *problems):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for id, answer in problems:
            writer.writerow([id, id[:4], id.split("-")[-1], f"Question {id},\nin two lines?", answer, ""])
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


@needs("aime_1983_2024.csv", "aime24.jsonl")
def test_the_real_files_have_the_known_counts():
    train = load_aime(REAL_DATA / "aime_1983_2024.csv", split="train")
    held_out = load_aime(REAL_DATA / "aime24.jsonl", split="eval")
    assert (len(train), len(held_out)) == (918, 30)
    assert {task.id[:4] for task in held_out} == {"2024"}
    assert max(task.id[:4] for task in train) == "2023"
    assert not {task.question for task in train} & {task.question for task in held_out}
