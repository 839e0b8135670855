import json
from pathlib import Path

import pytest
from real_data import REAL_DATA, needs

from envs.datasets.benchmarks import (
    BENCHMARKS,
    SHORT,
    load_benchmark,
    read_gaia,
    read_gpqa,
    read_medqa,
    read_number,
    read_short_answer,
    stem_of,
)
from reward.scorers import score_answer

SAMPLE = Path(__file__).parent / "benchmark_sample"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_loads_from_a_folder_and_its_own_answer_is_right(name):
    tasks = load_benchmark(name, SAMPLE, whole=False)
    assert len(tasks) == 2
    assert {task.dataset for task in tasks} == {name}
    solutions = {"1 1 4 6": "4*6*1*1", "4 6 6 8": "4+6+6+8"}
    for task in tasks:
        answer = solutions.get(task.answer, task.answer.split("\n")[0])
        assert score_answer(task, answer) == 1.0
        assert score_answer(task, "nonsense") == 0.0


@pytest.mark.parametrize("name", BENCHMARKS)
def test_file_with_another_number_of_items_is_refused(name):
    with pytest.raises(ValueError):
        load_benchmark(name, SAMPLE)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs(one.file or f"{name}.jsonl"))
        for name, one in BENCHMARKS.items()
        if name not in ("gaia", "gpqa")
    ],
)
def test_real_file_has_the_asserted_number_of_different_questions(name):
    tasks = load_benchmark(name, REAL_DATA)
    assert len(tasks) == (BENCHMARKS[name].subset or BENCHMARKS[name].count)
    assert len({task.question for task in tasks}) == len(tasks)


@pytest.mark.parametrize("second", ['{"id": "x", "question": "?", "answer": "a"}', "[1]", '{"id": "x"'])
def test_id_that_stands_twice_and_line_that_is_no_row_are_refused(tmp_path, second):
    (tmp_path / "musique.jsonl").write_text(f'{{"id": "x", "question": "?", "answer": "a"}}\n{second}\n')
    with pytest.raises(ValueError):
        load_benchmark("musique", tmp_path, whole=False)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_takes_the_plain_layout_and_keeps_the_question(name, tmp_path):
    listed = "Dr.\nA. Smith sees it.\nWhat next?\nA. one\nof two lines\nB. two\nC. three\nTake g = 10."
    plain = {
        "game24": ("Use 1, 1, 4 and 6.", "(1*1*4)*6 = 24"),
        "gpqa": (listed, "B"),
        "medqa": (listed, "two"),
        "aime24": ("How many?\nAll.", 73),
        "amc23": ("How many?\nAll.", 27.0),
    }
    question, answer = plain.get(name, ("How many?\nAll.", ["73", "seventy three"][: 1 if name == "gaia" else 2]))
    file = tmp_path / (BENCHMARKS[name].file or f"{name}.jsonl")
    file.write_text(json.dumps({"id": f"{name}-0", "question": question, "answer": answer}))
    [task] = load_benchmark(name, tmp_path, whole=False)
    assert task.id == f"{name}-0"
    assert question in task.question or task.answer == "1 1 4 6"
    assert (
        score_answer(task, {"gpqa": "B", "medqa": "B. two", "game24": "4*6*1*1", "amc23": "27"}.get(name, "73")) == 1.0
    )


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        ("Pick.\nA. Energy is\nkept.\nB. Energy can be made.", "A", "A. Energy is kept."),
        ("Q?\nA. x\nB. see\nA. inner\nC. z", "C", "C. z"),
        ("Q?\r\n(A) x\r\n(B) y", "(B)", "B. y"),
        ("Q?\nA. x\nB. y\n\nTake g = 10.", "B. y", "B. y"),
    ],
)
def test_options_may_have_several_lines_and_text_around_them(question, answer, right):
    assert read_gpqa({"question": question, "answer": answer}) == (f"{question}\nAnswer with the letter alone.", right)
    assert stem_of(read_gpqa({"question": question, "answer": answer})[0]) == question.split("\n")[0].strip()
    assert [stem_of(f"Who?{end}") for end in (f"\n{SHORT}", "\nA. one")] == ["Who?", "Who?\nA. one"]


def test_aliases_of_a_public_row_are_kept_one_a_line():
    row = {"id": "dev_0", "question": "Who?", "golden_answers": ["George  VI", "Albert"], "metadata": {}}
    question = "Who?\nAnswer in a few words: a name, a number, a date, yes or no."
    assert read_short_answer(row) == (question, "George VI\nAlbert")


def test_gaia_question_with_an_attachment_is_left_out():
    row = {"task_id": "a", "Question": "How many?", "Final answer": "17", "file_name": "", "Level": "1"}
    assert read_gaia(row)[1] == "17"
    assert read_gaia(row | {"file_name": "table.xlsx"}) is None


def test_number_that_its_column_made_a_float_is_whole_again():
    assert [read_number({"question": "?", "answer": answer})[1] for answer in ("27.0", 2.5)] == ["27", "2.5"]


def test_options_of_a_medical_question_stand_below_it():
    row = {"question": "Which?", "options": {"B": "two", "A": "one", "C": "x"}, "answer": "two", "answer_idx": "B"}
    assert read_medqa(row) == ("Which?\nA. one\nB. two\nC. x\nAnswer with the letter alone.", "B. two")


def test_right_option_of_a_public_gpqa_row_has_no_fixed_place_and_stays_where_it_was_put():
    rows = [
        {
            "Record ID": f"rec{number}",
            "Question": f"Question {number}?",
            "Correct Answer": " right\n",
            **{f"Incorrect Answer {wrong}": f"wrong {wrong}" for wrong in (1, 2, 3)},
        }
        for number in range(40)
    ]
    read = [*map(read_gpqa, rows)]
    assert {answer for _, answer in read} == {f"{letter}. right" for letter in "ABCD"}
    assert all(f"\n{answer}\n" in question for question, answer in read)
    assert [*map(read_gpqa, rows)] == read


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("musique", {"answer": None}),
        ("musique", {"golden_answers": [None]}),
        ("gaia", {"Final answer": None}),
        ("amc23", {"answer": None}),
        ("medqa", {"answer": "x"}),
        ("gaia", {"answer": ["a", "b"]}),
        ("hotpotqa", {"answer": {"value": "x"}}),
        ("2wiki", {"answer": True}),
        ("bamboogle", {}),
        ("medqa", {"options": {"A": "x", "B": None}, "answer_idx": "B"}),
        ("aime24", {"answer": "1000"}),
    ],
)
def test_row_without_a_usable_answer_is_refused(name, answer, tmp_path):
    (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": "Who?", **answer}))
    with pytest.raises(ValueError, match=name):
        load_benchmark(name, tmp_path, whole=False)
