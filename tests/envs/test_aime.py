import csv
import json

import pytest
from real_data import REAL_DATA, needs

from envs.datasets.aime import load_aime
from envs.datasets.registry import load_tasks

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


@pytest.mark.parametrize("write", [write_csv, lambda path, *problems: write_jsonl(path, *map(problem_row, problems))])
def test_a_file_may_begin_with_a_mark_of_byte_order(tmp_path, write):
    path = write(tmp_path / ("a.csv" if write is write_csv else "a.jsonl"), ("1983-1", "60"))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [task.id for task in load_aime(path, split="train", whole_file=False)] == ["1983-1"]


def problem_row(problem):
    return dict(zip(("ID", "Problem", "Answer"), (problem[0], "How many?", problem[1]), strict=True))


def test_the_problem_with_two_accepted_answers_is_left_out(tmp_path):
    path = write_csv(tmp_path / "a.csv", ("2022-II-8", "080 or 081 (both were accepted)"), ("2022-II-9", "000"))
    tasks = load_aime(path, split="train", whole_file=False)
    assert [(task.id, task.answer) for task in tasks] == [("2022-II-9", "0")]


@pytest.mark.parametrize("answer", ["", "1000", "-1", "3.0", "12 or 13", "12 ", "٣"])
def test_any_other_answer_than_three_digits_is_refused(tmp_path, answer):
    path = write_csv(tmp_path / "a.csv", ("2000-I-1", answer))
    with pytest.raises(ValueError, match="AIME 2000-I-1: an answer has 1 to 3 digits"):
        load_aime(path, split="train", whole_file=False)


def test_a_changed_count_is_refused(tmp_path):
    path = write_csv(tmp_path / "a.csv", ("1983-1", "60"), ("1983-2", "15"))
    with pytest.raises(ValueError, match="AIME train: expected 918 problems, found 2 in "):
        load_aime(path, split="train")
    with pytest.raises(ValueError, match="AIME eval: expected 30 problems, found 0 in "):
        load_aime(path, split="eval")


def test_a_repeated_problem_is_refused(tmp_path):
    path = write_csv(tmp_path / "a.csv", ("1983-1", "60"), ("1983-1", "60"))
    with pytest.raises(ValueError, match="the same problem id occurs twice"):
        load_aime(path, split="train", whole_file=False)


def test_the_id_comes_from_the_address_where_the_file_has_no_other(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", url_row("I", 1, "204"), url_row("II", 12, "023"))
    tasks = load_aime(path, split="eval", whole_file=False)
    assert [(task.id, task.answer) for task in tasks] == [("2024-I-1", "204"), ("2024-II-12", "23")]


def test_the_columns_of_the_public_test_set_are_read(tmp_path):
    row = {"ID": "2024-II-4", "Problem": "Find $m+n$.", "Solution": "...", "Answer": 33}
    [task] = load_aime(write_jsonl(tmp_path / "a.jsonl", row), split="eval", whole_file=False)
    assert (task.id, task.question, task.answer) == ("2024-II-4", "Find $m+n$.", "33")


def test_unknown_columns_ids_and_file_types_are_refused(tmp_path):
    with pytest.raises(ValueError, match="an AIME row needs"):
        load_aime(write_jsonl(tmp_path / "a.jsonl", {"question": "?", "answer": "1"}), split="eval")
    with pytest.raises(ValueError, match="AIME problem ids look like"):
        load_aime(write_csv(tmp_path / "a.csv", ("I-1983-1", "60")), split="train")
    with pytest.raises(ValueError, match="AIME problem ids look like 1983-1 or 2022-II-8, got '7'"):
        load_aime(write_jsonl(tmp_path / "b.jsonl", {"ID": 7, "Problem": "?", "Answer": 1}), split="eval")
    with pytest.raises(ValueError, match="AIME 2024-I-1: a question is a text, got None"):
        load_aime(write_jsonl(tmp_path / "c.jsonl", {"ID": "2024-I-1", "Problem": None, "Answer": 1}), split="eval")
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"AIME files end in \.csv or \.jsonl"):
        load_aime(tmp_path / "a.txt", split="train")


@pytest.mark.parametrize(("split", "public_id", "count"), [("train", "di-zhang", 918), ("eval", "Maxwell", 30)])
def test_without_a_file_the_public_data_set_of_the_split_is_loaded(monkeypatch, split, public_id, count):
    import datasets

    asked = []
    year = 2024 if split == "eval" else 1990
    rows = [{"ID": f"{year}-{n}", "Problem": "?", "Answer": n % 1000} for n in range(99)]

    def load_dataset(name, *, split):
        asked.append((name, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=f"expected {count} problems, found 99 in {public_id}"):
        load_aime(split=split)
    assert asked[0][1] == "train"


@needs("aime_1983_2024.csv", "aime24.jsonl")
def test_the_real_files_have_the_known_counts():
    train = load_aime(REAL_DATA / "aime_1983_2024.csv", split="train")
    held_out = load_aime(REAL_DATA / "aime24.jsonl", split="eval")
    assert (len(train), len(held_out)) == (918, 30)
    assert {task.id[:4] for task in held_out} == {"2024"}
    assert max(task.id[:4] for task in train) == "2023"
    assert not {task.question for task in train} & {task.question for task in held_out}


@needs("aime_1983_2024.csv")
def test_the_incomplete_2024_of_the_training_file_is_no_test_set():
    with pytest.raises(ValueError, match="AIME eval: expected 30 problems, found 14 in "):
        load_aime(REAL_DATA / "aime_1983_2024.csv", split="eval")


@needs("aime_1983_2024.csv")
def test_the_registry_picks_the_same_problems_for_the_same_seed():
    path = REAL_DATA / "aime_1983_2024.csv"
    picks = [load_tasks("aime", split="train", count=5, seed=seed, path=path) for seed in (0, 0, 1)]
    assert picks[0] == picks[1] != picks[2]
    with pytest.raises(ValueError, match="919 train tasks of 'aime' were asked for, it has 918"):
        load_tasks("aime", split="train", count=919, seed=0, path=path)
