import json
from datetime import date

import pyarrow
import pyarrow.parquet
import pytest

from configs.envs import EnvsConfig
from configs.reward import CollectConfig
from envs.datasets.own import OWN, OwnSources, load_own, own_tasks
from envs.datasets.registry import BUILT_IN, load_tasks
from envs.datasets.sampler import TaskSampler, collection_tasks, held_out_tasks
from envs.datasets.split import question_key
from reward.scorers import score_answer

CAPITALS = [
    {"question": f"What is the capital of country {number}?", "answer": f"City {number}"} for number in range(20)
]


def asked(role, text="What is in it?"):
    return {"role": role, "content": text}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path):
    return lambda *rows: write(tmp_path / "mine.jsonl", *rows)


def test_rows_become_tasks_that_their_own_answer_solves(file):
    path = file(
        {"id": "fr", "question": "Capital of France?", "answer": ["Paris", "City of Light"], "split": "train"},
        {"question": "Two and two?", "answer": 4, "split": "train"},
        {"question": "held out", "answer": "x", "split": "eval"},
    )
    france, two_and_two = load_own("own_text", path, split="train")
    assert (france.id, france.dataset, france.answer) == ("own_text-fr", "own_text", "Paris\nCity of Light")
    assert (two_and_two.id, two_and_two.answer) == ("own_text-2", "4")
    assert score_answer(france, "the city of light!") == 1.0
    assert score_answer(france, "Lyon") == 0.0


def test_an_empty_id_is_none(file):
    halves = own_tasks("own_text", file(*({**row, "id": None} for row in CAPITALS)))
    assert {task.id for tasks in halves.values() for task in tasks} == {f"own_text-{n}" for n in range(1, 21)}


def test_a_question_may_be_a_prompt_or_the_message_of_a_user(file):
    path = file(
        {"prompt": "first", "answer": "a", "split": "train"},
        {"prompt": [asked("user", "second")], "answer": "b", "split": "train"},
        {"messages": [asked("user", "third")], "answer": "c", "split": "train"},
        {"question": "fourth", "prompt": "kept", "answer": "d", "split": "train"},
    )
    tasks = load_own("own_text", path, split="train")
    assert [task.question for task in tasks] == ["first", "second", "third", "fourth"]
    assert [task.metadata for task in tasks] == [{}, {}, {}, {"prompt": "kept"}]


def test_further_columns_reach_a_scorer_of_ones_own(file, tmp_path, monkeypatch):
    (tmp_path / "near_enough.py").write_text(
        "def score(task, answer):\n    return abs(int(answer) - int(task.answer)) <= task.metadata['near']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = file({"question": "How many?", "answer": 40, "near": 2, "split": "train"})
    own = OwnSources(scorer="near_enough:score")
    [task] = load_tasks("own_integer", split="train", count=None, seed=0, path=path, own=own)
    assert task.metadata == {"near": 2}
    assert [score_answer(task, answer) for answer in ("40", "42", "43")] == [1.0, 1.0, 0.0]


def test_a_scorer_of_ones_own_reads_an_answer_as_it_is_written(file, tmp_path):
    """Regression: its lines and spaces were lost, as they are where texts are compared."""
    code = "def double(x):\n    return 2 * x\n"
    path = file(
        {"question": "Write double.", "answer": code, "split": "train"},
        {"question": "Greet.", "answer": ["good  day", "hello\nthere"], "split": "train"},
        {"question": "held out", "answer": "x", "split": "eval"},
    )
    own = OwnSources(scorer="my_reward:score")
    drawn = load_tasks("own_text", split="train", count=None, seed=0, path=path, own=own)
    envs = EnvsConfig(mix={"own_text": 1.0}, data_path=str(path))
    collected = collection_tasks(envs, CollectConfig(num_tasks=2), seed=0, leak_report=tmp_path / "l.json", own=own)
    for tasks in (drawn, collected):
        assert sorted(task.answer for task in tasks) == [code, "good day\nhello there"]
    compared = load_tasks("own_text", split="train", count=None, seed=0, path=path)
    assert sorted(task.answer for task in compared) == ["def double(x): return 2 * x", "good day\nhello there"]


def test_a_parquet_file_is_read_like_lines(tmp_path):
    rows = {
        "question": ["Capital of France?", "Two and two?"],
        "answer": [["Paris", "City of Light"], ["4"]],
        "split": ["train", "train"],
        "id": ["fr", None],
        "when": [date(2024, 5, 1), None],
        "picture": [b"\x89PNG", None],
        "scores": [{"hard": 0.5}, {"hard": 1.0}],
    }
    path = tmp_path / "mine.parquet"
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    france, sum_of_two = load_own("own_text", path, split="train")
    assert (france.id, france.answer, sum_of_two.id) == ("own_text-fr", "Paris\nCity of Light", "own_text-2")
    # No picture: JSON holds none.
    assert france.metadata == {"when": "2024-05-01", "scores": {"hard": 0.5}}
    assert sum_of_two.metadata == {"scores": {"hard": 1.0}}


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    path = tmp_path / "mine.parquet"
    path.write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(ValueError, match=r"mine\.parquet is no Parquet file: ") as caught:
        own_tasks("own_text", path)
    assert "\n" not in str(caught.value)


def test_a_file_may_begin_with_a_mark_of_byte_order_and_is_named_where_it_is_no_utf_8(tmp_path):
    path = tmp_path / "mine.jsonl"
    row = json.dumps({"question": "Où?", "answer": "là", "split": "train"}, ensure_ascii=False)
    path.write_text(row, encoding="utf-8-sig")
    [task] = load_own("own_text", path, split="train")
    assert (task.question, task.answer) == ("Où?", "là")
    for encoding in ("latin-1", "utf-16"):
        path.write_text(row, encoding=encoding)
        with pytest.raises(ValueError, match=r"mine\.jsonl is not UTF-8 text"):
            own_tasks("own_text", path)


def test_half_a_surrogate_pair_in_a_question_is_read_as_a_question_mark(file):
    """Regression: a text that was cut in the midst of an emoji ended the labelling of a PRM's steps in a traceback."""
    path = file({"question": "What is this: \ud83d", "answer": "a", "split": "train"})
    [task] = load_own("own_text", path, split="train")
    assert task.question == "What is this: ?"


@pytest.mark.parametrize(
    ("dataset", "reference", "right", "wrong"),
    [
        ("own_integer", 1234, "1,234", "1234.0"),
        ("own_math", "1/2", "\\frac{2}{4}", "2"),
        ("own_choice", "C. a whale", "C", "B"),
        ("own_text", "The Nile", "nile", "Amazon"),
    ],
)
def test_the_name_of_the_data_set_says_how_answers_are_compared(file, dataset, reference, right, wrong):
    path = file({"question": "q", "answer": reference, "split": "train"})
    [task] = load_own(dataset, path, split="train")
    assert (score_answer(task, right), score_answer(task, wrong)) == (1.0, 0.0)


def test_without_named_halves_the_question_decides_and_no_task_is_in_both(file):
    path = file(*CAPITALS)
    train, held_out = (load_own("own_text", path, split=split) for split in ("train", "eval"))
    assert len(train) + len(held_out) == 20
    assert not {task.question for task in train} & {task.question for task in held_out}
    again = load_own("own_text", file(*reversed(CAPITALS)), split="train")
    assert {task.question for task in again} == {task.question for task in train}


def test_questions_that_differ_in_case_spacing_or_punctuation_are_in_one_half(file):
    first = [{"question": f"How many legs do {number} spiders have?", "answer": "8"} for number in range(100)]
    again = [{"question": f"how  many legs do {number} spiders have ?", "answer": "8"} for number in range(100)]
    halves = own_tasks("own_text", file(*first, *again))
    train, held_out = ({question_key(task.question) for task in halves[split]} for split in ("train", "eval"))
    assert len(train) + len(held_out) == 100
    assert not train & held_out


def test_question_that_both_named_halves_have_is_refused(file):
    rows = (
        {"question": "Capital of France?", "answer": "Paris", "split": "train"},
        {
            "question": "capital of  France",
            "answer": "Paris",
            "split": "eval",
        },
    )
    with pytest.raises(ValueError, match="own_text-2 is for 'eval' and own_text-1 for 'train', and they ask the same"):
        load_own("own_text", file(*rows), split="train")


def test_training_and_evaluation_draw_from_their_halves(file):
    path = file(*CAPITALS)
    train = {task.question for task in load_own("own_text", path, split="train")}
    sampler = TaskSampler({"own_text": 1.0}, seed=0, path=path)
    # A round goes through the whole half once.
    assert {sampler.task(ordinal).question for ordinal in range(len(train))} == train
    held_out = held_out_tasks({"own_text": 1.0}, count=3, seed=0, path=path)
    assert len(held_out) == 3
    assert not {task.question for task in held_out} & train


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "q", "answer": ""}, "row 2: 'answer' must be a text or a whole number"),
        ({"question": "q", "answer": 1.5}, "got 1.5"),
        ({"question": "q", "answer": True}, "got True"),
        ({"question": "q", "answer": []}, "or a list of such, got"),
        ({"question": " ", "answer": "a"}, "row 2: 'question' must be a text"),
        ({"prompt": 3, "answer": "a"}, "row 2: 'prompt' must be a text, got 3"),
        ({"messages": [], "answer": "a"}, "'messages' must hold one message, the user's, got none; the planner has"),
        ({"prompt": [asked("system"), asked("user")], "answer": "a"}, "row 2: 'prompt' must hold one message, the"),
        ({"messages": [asked("user"), asked("assistant"), asked("user")], "answer": "a"}, "got user, assistant, user;"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}], "answer": "a"}, "'messages' must be a text"),
        ({"question": "q", "answer": "a", "split": "test"}, "row 1: 'split' must be 'train' or 'eval' in every row"),
        ({"question": "What is the capital  of country 0?", "answer": "a"}, "stands in 2 rows; keep one of them"),
    ],
)
def test_row_that_is_no_task_is_named(file, row, says):
    with pytest.raises(ValueError, match=r"mine\.jsonl") as caught:
        load_own("own_text", file(CAPITALS[0], row), split="train")
    assert says in str(caught.value)


def test_list_of_answers_is_for_texts_only(file):
    with pytest.raises(ValueError, match=r"'answer' must be a text or a whole number, got \['1', '2'\]"):
        load_own("own_integer", file({"question": "q", "answer": ["1", "2"]}), split="train")


def test_empty_half_says_how_to_fill_it(file):
    rows = [{**row, "split": "train"} for row in CAPITALS]
    with pytest.raises(ValueError, match="none of its 20 rows is for 'eval'"):
        load_own("own_text", file(*rows), split="eval")


def test_without_a_file_the_setting_is_named():
    with pytest.raises(ValueError, match=r"set envs\.data_path"):
        load_tasks("own_text", split="train", count=1, seed=0)


def test_every_kind_of_own_data_can_be_drawn():
    assert set(OWN) <= set(BUILT_IN)
