"""Custom tasks: from a file, from a function, and from the Hugging Face hub."""

import json
from datetime import date

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from configs.envs import OwnDatasetConfig
from configs.loading import load_run_config
from configs.plugins import OwnCodeError
from configs.run import RunConfig
from envs.datasets.custom import CustomSources, read_source
from envs.datasets.rows import question_key
from envs.datasets.sampler import (
    cold_start_tasks,
    collection_tasks,
    evaluation_tasks,
    held_out_tasks,
    load_tasks,
    never_trained_on,
    training_tasks,
)
from envs.types import Task
from ray_jobs.run.task_checks import notes_before_start
from reward.scorers import score_answer

CAPITALS = [{"question": f"What is the capital of country {n}?", "answer": f"City {n}"} for n in range(20)]
CODE = "def double(x):\n    return 2 * x\n"


def message(role, text="What is in it?"):
    return {"role": role, "content": text}


def of_file(path, compared="text", **sources):
    """The data set `mine` of a file."""
    read_source.cache_clear()
    return CustomSources(datasets={"mine": OwnDatasetConfig(source=str(path), scorer=compared)}, **sources)


def parts_of(config, *, name="mine", with_teacher=False):
    return CustomSources(datasets={name: config}, with_teacher=with_teacher).parts(name)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path):
    return lambda *rows: write(tmp_path / "mine.jsonl", rows)


# Files


def test_rows_of_a_file_become_tasks(file):
    path = file(
        {"id": "fr", "question": "Capital of France?", "answer": ["Paris", "City of Light"], "split": "train"},
        {"id": None, "prompt": "Two and two?", "answer": 4, "split": "train"},
        {"prompt": [message("user", "third")], "answer": "c", "split": "train"},
        {"messages": [message("user", [{"type": "text", "text": "cut \ud83d"}])], "answer": "d", "split": "train"},
        {"question": "fifth", "prompt": "kept", "answer": "e", "split": "train"},
        {"question": "held out", "answer": "x", "split": "eval"},
    )
    tasks = of_file(path).tasks("mine", "train")
    assert [task.id for task in tasks] == ["mine-fr", *(f"mine-{number}" for number in (2, 3, 4, 5))]
    assert [task.question for task in tasks][1:] == ["Two and two?", "third", "cut ?", "fifth"]
    assert [task.metadata for task in tasks] == [{"answer": ["Paris", "City of Light"]}, {}, {}, {}, {"prompt": "kept"}]
    assert (tasks[0].answer, tasks[1].answer) == ("Paris\nCity of Light", "4")
    assert [score_answer(tasks[0], answer) for answer in ("the city of light!", "Lyon")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("scorer", "reference", "right", "wrong"),
    [
        ("integer", 1234, "1,234", "1234.5"),
        ("math", "1/2", "\\frac{2}{4}", "2"),
        ("choice", " C. a  whale", "C", "B"),
        ("text", "The Nile", "nile", "Amazon"),
    ],
)
def test_scorer_of_the_data_set_decides_the_comparison(file, scorer, reference, right, wrong):
    path = file({"question": "q", "answer": reference, "split": "train"})
    [task] = of_file(path, scorer).tasks("mine", "train")
    assert (score_answer(task, right), score_answer(task, wrong)) == (1.0, 0.0)


def test_custom_scorer_gets_further_columns_and_unchanged_answers(file, tmp_path, monkeypatch):
    (tmp_path / "near_enough.py").write_text(
        "def score(task, answer):\n    return abs(int(answer) - int(task.answer)) <= task.metadata['near']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = file({"question": "How many?", "answer": 40, "near": 2, "split": "train"})
    custom = of_file(path, None, scorer="near_enough:score")
    [task] = load_tasks("mine", split="train", count=None, seed=0, custom=custom)
    assert [score_answer(task, answer) for answer in ("40", "42", "43")] == [1.0, 1.0, 0.0]

    path = file({"question": "Write double.", "answer": CODE, "split": "train"}, {**CAPITALS[0], "split": "eval"})
    [written] = of_file(path, None, scorer="near_enough:score").tasks("mine", "train")
    assert written.answer == CODE
    [compared] = of_file(path).tasks("mine", "train")
    assert compared.answer == "def double(x): return 2 * x"


def test_parquet_file_is_read_like_json_lines(tmp_path):
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
    france, sum_of_two = of_file(path).tasks("mine", "train")
    assert (france.id, france.answer, sum_of_two.id) == ("mine-fr", "Paris\nCity of Light", "mine-2")
    assert france.metadata == {"when": "2024-05-01", "scores": {"hard": 0.5}, "answer": ["Paris", "City of Light"]}
    assert sum_of_two.metadata == {"scores": {"hard": 1.0}, "answer": ["4"]}
    path.write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(ValueError, match=r"mine\.parquet"):
        of_file(path).parts("mine")


def test_hash_of_the_question_decides_the_split_whatever_case_spacing_or_punctuation(file):
    first = [{"question": f"How many legs do {number} spiders have?", "answer": "8"} for number in range(100)]
    again = [{"question": f"how  many legs do {number} spiders have ?", "answer": "8"} for number in range(100)]
    parts = of_file(file(*first, *again)).parts("mine")
    keys = [{question_key(task.question) for task in parts[part]} for part in ("train", "eval", "prm")]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 100
    reordered = of_file(file(*reversed(first))).parts("mine")
    assert {question_key(task.question) for task in reordered["train"]} == keys[0]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "answer": ""},
        {"question": "q", "answer": 1.5},
        {"question": "q", "answer": True},
        {"question": "q", "answer": []},
        {"question": " ", "answer": "a"},
        {"prompt": 3, "answer": "a"},
        {"messages": [], "answer": "a"},
        {"prompt": [message("system"), message("user")], "answer": "a"},
        {"messages": [message("user"), message("assistant"), message("user")], "answer": "a"},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}], "answer": "a"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}], "answer": "a"},
        {"question": "q", "answer": "a", "split": "test"},
        {"question": "another", "answer": "a", "id": 1},
    ],
)
def test_row_that_is_not_a_task_is_refused_with_its_file(file, row):
    with pytest.raises(ValueError, match=r"mine\.jsonl"):
        of_file(file(CAPITALS[0], row)).parts("mine")


def test_file_with_an_empty_split_or_too_many_answers_is_refused(file):
    with pytest.raises(ValueError, match="eval"):
        of_file(file(*({**row, "split": "train"} for row in CAPITALS))).tasks("mine", "eval")
    with pytest.raises(ValueError, match="answer"):
        of_file(file({"question": "q", "answer": ["1", "2"]}), "integer").parts("mine")
    with pytest.raises(ValueError, match="gsm8k"):
        load_tasks("gsm8k", split="train", count=1, seed=0)


def test_duplicates_are_dropped_on_the_training_side_first_and_counted(file):
    first, second, third = CAPITALS[:3]
    path = file(
        *({**row, "split": "train"} for row in (first, first, second, third)),
        {**first, "question": first["question"].upper(), "split": "eval"},
        {"question": "in other words", "kept_with": second["question"], "answer": "x", "split": "eval"},
    )
    custom = of_file(path)
    assert {part: [task.id for task in tasks] for part, tasks in custom.parts("mine").items() if tasks} == {
        "train": ["mine-4"],
        "eval": ["mine-5", "mine-6"],
    }
    assert custom.num_dropped("mine") == 3
    settings = ["envs.mix={mine=1}", f"envs.datasets={{mine={{source='{path}'}}}}", "evaluation.num_tasks=2"]
    [note, *_] = notes_before_start(load_run_config(None, settings))
    assert note.startswith("3 ")
    with pytest.raises(ValueError, match="train"):
        parts_of(source("shared_group"))


def test_training_never_asks_the_held_out_rows_of_a_file(file):
    path = file(*CAPITALS)
    config = load_run_config(None, ["envs.mix={mine=1}", f"envs.datasets={{mine={{source='{path}'}}}}"])
    held_out = held_out_tasks(config.envs.mix, count=3, seed=0, custom=of_file(path))
    train = of_file(path, with_prm=False).tasks("mine", "train")
    sampler = training_tasks(config)
    assert len(train) == len(of_file(path).tasks("mine", "train")) + len(of_file(path).tasks("mine", "prm"))
    assert {sampler.task(ordinal).id for ordinal in range(len(train))} == {task.id for task in train}
    assert never_trained_on([*train, *held_out], config.envs) == held_out


# Functions

FUNCTIONS = """
from envs.types import Task

def load():
    for number in range(80):
        yield {"question": f"What is {number} and one?", "answer": number + 1, "source": "by hand"}

def named():
    return [
        {"id": "a", "question": "train one", "answer": "x", "split": "train", "scorer": "text"},
        {"id": "b", "question": "held out", "answer": ["y", "z"], "split": "eval", "scorer": "text"},
        {"id": "c", "question": "for the PRM", "answer": 3, "split": "prm", "scorer": "integer"},
        {"id": "d", "question": "shown", "answer": 3, "split": "demonstrations", "scorer": ""},
    ]

def numbered():
    return [Task(id=n, dataset="any", question=f"What is {n} and one?", answer=n + 1) for n in range(9)]

def no_question():
    return [Task(id="t", dataset="any", question=None, answer="x")]

def no_answer():
    return [Task(id="t", dataset="any", question="q", answer=None)]

def scored_by_an_object():
    return [Task(id="t", dataset="any", question="q", answer="x", scorer=len)]

def with_a_set():
    return [Task(id="t", dataset="d", question="a?", answer="x", metadata={"near": {1, 2}})]

def shared_group():
    rows = [{"question": name, "answer": "x", "kept_with": "one"} for name in ("first", "second")]
    return [rows[0] | {"split": "train"}, rows[1] | {"split": "eval"}]

def broken():
    raise OSError("no file")

def needs(path):
    return []

def grouped():
    return [
        {"question": question, "answer": "x", **further}
        for n in range(40)
        for question, further in ((f"q{n}", {}), (f"q{n} [1]", {"kept_with": f"Q{n}?"}))
    ]
"""
TEACHER = ["agent.function=mine:solve", "reward.credit=outcome", "cold_start.function=mine:teach"]


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    (tmp_path / "functions_of_the_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    read_source.cache_clear()


def source(name, **further):
    return OwnDatasetConfig(source=f"functions_of_the_test:{name}", **further)


def config_of(name, *overrides):
    table = f"envs.datasets={{mine={{source='functions_of_the_test:{name}'}}}}"
    return load_run_config(None, [table, "envs.mix={mine=1.0}", "reward.scorer=some:one", *overrides])


def all_tasks(config, name="mine"):
    return [task for tasks in parts_of(config, name=name).values() for task in tasks]


def test_rows_of_a_function_are_split_by_their_questions():
    parts = parts_of(source("load"))
    assert [part for part, tasks in parts.items() if tasks] == ["train", "eval", "prm"]
    assert len({task.question for tasks in parts.values() for task in tasks}) == 80
    assert len(parts["prm"]) < len(parts["train"]) < len(parts["eval"]) + len(parts["train"])
    first = min(all_tasks(source("load")), key=lambda task: int(task.answer))
    assert (first.id, first.dataset, first.answer) == ("mine-1", "mine", "1")
    assert (first.scorer, first.metadata) == (None, {"source": "by hand"})


def test_teacher_gets_tasks_that_rl_would_have_had_without_it():
    without, parts = parts_of(source("load")), parts_of(source("load"), with_teacher=True)
    assert [*map(len, (parts["train"], parts["demonstrations"]))] > [0, 0]
    assert {task.id for part in ("train", "demonstrations") for task in parts[part]} == {
        task.id for task in without["train"]
    }
    assert (parts["eval"], parts["prm"]) == (without["eval"], without["prm"])

    config = config_of("load", *TEACHER, "cold_start.num_demonstrations=6")
    demonstrated, sampler = cold_start_tasks(config), training_tasks(config)
    assert len({planned.task.id for planned in demonstrated}) == 6
    assert not {planned.task.id for planned in demonstrated} & {sampler.task(ordinal).id for ordinal in range(100)}
    assert {(planned.task.scorer, planned.plan) for planned in demonstrated} == {("some:one", ())}
    with pytest.raises(ValueError, match=r"envs\.mix"):
        cold_start_tasks(load_run_config(None, ["envs.mix={game24=1.0}", *TEACHER]))


def test_tasks_of_a_group_are_in_the_same_part():
    parts = parts_of(source("grouped"), with_teacher=True)
    groups = [{task.question.partition(" [")[0] for task in tasks} for tasks in parts.values()]
    assert all(len(tasks) == 2 * len(group) > 0 for tasks, group in zip(parts.values(), groups, strict=True))
    kept = [{"kept_with": min(group)} for group in groups]
    others = [Task(id="x", dataset="other", question="?", answer="x", metadata=metadata) for metadata in kept]
    assert never_trained_on(others, config_of("grouped").envs) == [others[1]]


def test_split_of_a_row_is_kept_and_removed_from_the_metadata():
    parts = parts_of(source("named", scorer="math"))
    assert {part: [task.id for task in tasks] for part, tasks in parts.items()} == {
        "train": ["mine-a"],
        "eval": ["mine-b"],
        "demonstrations": ["mine-d"],
        "prm": ["mine-c"],
    }
    assert parts["eval"][0].answer == "y\nz"
    assert (parts["prm"][0].scorer, parts["demonstrations"][0].scorer) == ("integer", "math")
    assert {name for task in all_tasks(source("named")) for name in task.metadata} == {"answer"}
    rows = all_tasks(source("named"))
    assert [task.id for task in never_trained_on(rows, config_of("named").envs)] == ["mine-b"]


def test_ready_made_tasks_have_the_name_of_the_data_set_in_their_ids():
    for name in ("mine", "others"):
        tasks = all_tasks(source("numbered"), name)
        assert {(task.id, task.dataset, task.answer) for task in tasks} == {
            (f"{name}-{number}", name, str(number + 1)) for number in range(9)
        }


@pytest.mark.parametrize(
    ("name", "error", "part"),
    [
        ("no_question", ValueError, "question"),
        ("no_answer", ValueError, "answer"),
        ("scored_by_an_object", ValueError, "scorer"),
        ("with_a_set", ValueError, "set"),
        ("broken", OwnCodeError, "OSError"),
        ("needs", OwnCodeError, r"envs\.datasets\.mine\.source"),
        ("missing", OwnCodeError, r"envs\.datasets\.mine\.source"),
    ],
)
def test_function_without_usable_tasks_is_refused_in_one_line(name, error, part):
    with pytest.raises(error, match=part) as caught:
        parts_of(source(name))
    assert "functions_of_the_test" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_training_evaluation_and_collection_are_disjoint_and_have_the_scorer_of_the_recipe():
    prm = ("reward.credit=outcome_guided", "label.type=monte_carlo")
    config = config_of("load", "reward.timeout_s=3", "evaluation.num_tasks=20", *prm)
    custom, sampler = CustomSources.of(config), training_tasks(config)
    trained = [sampler.task(ordinal) for ordinal in range(100)]
    held_out = evaluation_tasks(config)
    collected = collection_tasks(config.envs.mix, count=5, seed=0, custom=custom)
    ids = [{task.id for task in tasks} for tasks in (trained, held_out, collected)]
    assert sum(map(len, ids)) == len(set.union(*ids))
    assert {(task.scorer, task.scoring_limit_s) for task in (*trained, *held_out, *collected)} == {("some:one", 3.0)}
    assert never_trained_on([*trained, *held_out], config.envs) == held_out
    assert read_source.cache_info().misses == 1
    assert custom.scored(Task(id="t", dataset="d", question="q", answer="a", scorer="math")).scorer == "math"


def test_collected_tasks_have_the_order_of_the_mix_in_every_process():
    custom = CustomSources(datasets=dict.fromkeys("hgfedcba", source("load")))
    collected = collection_tasks(dict.fromkeys("hgfedcba", 1.0), count=8, seed=0, custom=custom)
    assert "".join(task.dataset for task in collected) == "hgfedcba"


# The hub

CARD = """---
configs:
- config_name: easy
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
- config_name: hard
  data_files:
  - {split: train, path: test.jsonl}
---
"""


def row(first, second, **more):
    return {"problem": f"{first} + {second}?", "solution": str(first + second), "level": first, **more}


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """A data set mine/sums with two configurations and two splits, in a folder that the hub's client reads."""
    folder = tmp_path / "mine" / "sums"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    write(folder / "train.jsonl", [row(n, 1, scorer="os:system", split="eval", id=7) for n in range(40)])
    write(folder / "test.jsonl", [row(n, 100, scorer="os:system", split="x", id=7) for n in range(6)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    return {"source": "hf:mine/sums", "config": "easy", "question": "problem", "answer": "solution"}


def test_one_split_of_the_hub_is_trained_on_and_another_held_out(sums):
    custom = CustomSources(datasets={"sums": OwnDatasetConfig(**sums, eval_split="test", scorer="integer")})
    held_out = load_tasks("sums", split="eval", count=None, seed=0, custom=custom)
    train = load_tasks("sums", split="train", count=None, seed=0, custom=custom)
    prm = custom.tasks("sums", "prm")
    assert sorted(task.question for task in held_out) == [f"{n} + 100?" for n in range(6)]
    assert len(train) + len(prm) == 40
    assert len(train) > len(prm) > 0
    [task] = [task for task in held_out if task.question == "5 + 100?"]
    assert (task.id, task.dataset, task.answer, task.metadata) == ("sums-test-6", "sums", "105", {"level": 5})
    assert (score_answer(task, "105"), score_answer(task, "104")) == (1.0, 0.0)


def test_rows_of_the_hub_set_neither_scorer_nor_split(sums):
    parts = parts_of(OwnDatasetConfig(**sums, scorer="integer"), name="sums")
    assert sum(map(len, parts.values())) == 40
    assert min(len(parts[part]) for part in ("train", "eval", "prm")) > 0
    assert {task.scorer for tasks in parts.values() for task in tasks} == {"integer"}
    assert not RunConfig(envs={"datasets": {"sums": sums}}).names_code


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"question": "text"}, r"envs\.datasets\.sums\.question"),
        ({"question": None}, r"envs\.datasets\.sums\.question"),
        ({"answer": "label"}, r"envs\.datasets\.sums\.answer"),
        ({"config": "middle"}, r"envs\.datasets\.sums"),
        ({"eval_split": "dev"}, r"envs\.datasets\.sums"),
        ({"source": "hf:mine/none"}, r"envs\.datasets\.sums"),
    ],
)
def test_unloadable_data_set_of_the_hub_is_refused_in_one_line(sums, changed, part):
    with pytest.raises(ValueError, match=part) as caught:
        parts_of(OwnDatasetConfig(**(sums | changed)), name="sums")
    assert "\n" not in str(caught.value)


def test_broken_rows_of_the_hub_are_refused_and_repeated_ones_dropped(sums, tmp_path):
    folder = tmp_path / "mine" / "sums"
    write(folder / "test.jsonl", [{"other": 1}])
    with pytest.raises(ValueError, match=r"envs\.datasets\.sums"):
        parts_of(OwnDatasetConfig(**sums), name="sums")
    write(folder / "train.jsonl", [row(n, 1) for n in [*range(30), 7] * 3])
    write(folder / "test.jsonl", [row(3, 1), row(99, 1)])
    read_source.cache_clear()
    parts = parts_of(OwnDatasetConfig(**sums, eval_split="test"), name="sums")
    assert (len(parts["train"]) + len(parts["prm"]), len(parts["eval"])) == (29, 2)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"source": "hf:"}, "source"),
        ({"source": "hf:/etc/passwd"}, "source"),
        ({"source": "hf:a/b", "eval_split": "train"}, "eval_split"),
    ],
)
def test_contradicting_settings_are_refused(settings, name):
    with pytest.raises(ValidationError, match=name):
        OwnDatasetConfig(**settings)
