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
from envs.datasets.custom import CustomSources, file_tasks, module_tasks, read_source
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


def load_file(name, path, *, split):
    return CustomSources(path=path).tasks(name, split)


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
    tasks = load_file("own_text", path, split="train")
    assert [task.id for task in tasks] == ["own_text-fr", *(f"own_text-{number}" for number in (2, 3, 4, 5))]
    assert [task.question for task in tasks][1:] == ["Two and two?", "third", "cut ?", "fifth"]
    assert [task.metadata for task in tasks] == [{"answer": ["Paris", "City of Light"]}, {}, {}, {}, {"prompt": "kept"}]
    assert (tasks[0].answer, tasks[1].answer) == ("Paris\nCity of Light", "4")
    assert [score_answer(tasks[0], answer) for answer in ("the city of light!", "Lyon")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("dataset", "reference", "right", "wrong"),
    [
        ("own_integer", 1234, "1,234", "1234.5"),
        ("own_math", "1/2", "\\frac{2}{4}", "2"),
        ("own_choice", "C. a whale", "C", "B"),
        ("own_text", "The Nile", "nile", "Amazon"),
    ],
)
def test_name_of_the_data_set_decides_the_comparison(file, dataset, reference, right, wrong):
    [task] = load_file(dataset, file({"question": "q", "answer": reference, "split": "train"}), split="train")
    assert (score_answer(task, right), score_answer(task, wrong)) == (1.0, 0.0)


def test_custom_scorer_gets_further_columns_and_unchanged_answers(file, tmp_path, monkeypatch):
    (tmp_path / "near_enough.py").write_text(
        "def score(task, answer):\n    return abs(int(answer) - int(task.answer)) <= task.metadata['near']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = file({"question": "How many?", "answer": 40, "near": 2, "split": "train"})
    custom = CustomSources(scorer="near_enough:score", path=path)
    [task] = load_tasks("own_integer", split="train", count=None, seed=0, custom=custom)
    assert [score_answer(task, answer) for answer in ("40", "42", "43")] == [1.0, 1.0, 0.0]

    path = file({"question": "Write double.", "answer": CODE, "split": "train"}, {**CAPITALS[0], "split": "eval"})
    drawn = load_tasks("own_text", split="train", count=None, seed=0, custom=custom)
    drawn += collection_tasks({"own_text": 1.0}, count=2, seed=0, custom=custom)
    assert [task.answer for task in drawn] == [CODE, CODE]
    [compared] = load_tasks("own_text", split="train", count=None, seed=0, custom=CustomSources(path=path))
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
    france, sum_of_two = load_file("own_text", path, split="train")
    assert (france.id, france.answer, sum_of_two.id) == ("own_text-fr", "Paris\nCity of Light", "own_text-2")
    assert france.metadata == {"when": "2024-05-01", "scores": {"hard": 0.5}, "answer": ["Paris", "City of Light"]}
    assert sum_of_two.metadata == {"scores": {"hard": 1.0}, "answer": ["4"]}
    path.write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(ValueError, match=r"mine\.parquet"):
        file_tasks("own_text", path)


def test_hash_of_the_question_decides_the_split_whatever_case_spacing_or_punctuation(file):
    first = [{"question": f"How many legs do {number} spiders have?", "answer": "8"} for number in range(100)]
    again = [{"question": f"how  many legs do {number} spiders have ?", "answer": "8"} for number in range(100)]
    splits = file_tasks("own_text", file(*first, *again))
    train, held_out = ({question_key(task.question) for task in splits[split]} for split in ("train", "eval"))
    assert len(train) + len(held_out) == 100
    assert not train & held_out
    reordered = file_tasks("own_text", file(*reversed(first)))
    assert {question_key(task.question) for task in reordered["train"]} == train


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
        load_file("own_text", file(CAPITALS[0], row), split="train")


def test_file_with_an_empty_split_or_too_many_answers_is_refused(file):
    with pytest.raises(ValueError, match="eval"):
        load_file("own_text", file(*({**row, "split": "train"} for row in CAPITALS)), split="eval")
    with pytest.raises(ValueError, match="answer"):
        load_file("own_integer", file({"question": "q", "answer": ["1", "2"]}), split="train")
    with pytest.raises(ValueError, match=r"envs\.data_path"):
        load_tasks("own_text", split="train", count=1, seed=0)
    with pytest.raises(ValueError, match="gsm8k"):
        load_tasks("gsm8k", split="train", count=1, seed=0)


def test_duplicates_are_dropped_on_the_training_side_first_and_counted(file):
    first, second, third = CAPITALS[:3]
    path = file(
        *({**row, "split": "train"} for row in (first, first, second, third)),
        {**first, "question": first["question"].upper(), "split": "eval"},
        {"question": "in other words", "kept_with": second["question"], "answer": "x", "split": "eval"},
    )
    custom = CustomSources(path=path)
    assert {part: [task.id for task in tasks] for part, tasks in custom.parts("own_text").items()} == {
        "train": ["own_text-4"],
        "eval": ["own_text-5", "own_text-6"],
    }
    assert custom.num_dropped("own_text") == 3
    settings = ["envs.mix={own_text=1}", f"envs.data_path={path}", "evaluation.num_tasks=2"]
    [note, *_] = notes_before_start(load_run_config(None, settings))
    assert note.startswith("3 ")
    with pytest.raises(ValueError, match="train"):
        module_tasks("mine", source("shared_group"))


def test_training_never_asks_the_held_out_rows_of_a_file(file):
    config = load_run_config(None, ["envs.mix={own_text=1}", f"envs.data_path={file(*CAPITALS)}"])
    held_out = held_out_tasks(config.envs.mix, count=3, seed=0, custom=CustomSources(path=file(*CAPITALS)))
    train = load_file("own_text", file(*CAPITALS), split="train")
    sampler = training_tasks(config)
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


def all_tasks(*arguments, **named):
    return [task for tasks in module_tasks(*arguments, **named).values() for task in tasks]


def test_rows_of_a_function_are_split_by_their_questions():
    parts = module_tasks("mine", source("load"))
    assert [part for part, tasks in parts.items() if tasks] == ["train", "eval", "prm"]
    assert len({task.question for tasks in parts.values() for task in tasks}) == 80
    assert len(parts["prm"]) < len(parts["train"]) < len(parts["eval"]) + len(parts["train"])
    first = min(all_tasks("mine", source("load")), key=lambda task: int(task.answer))
    assert (first.id, first.dataset, first.answer) == ("mine-1", "mine", "1")
    assert (first.scorer, first.metadata) == (None, {"source": "by hand"})


def test_teacher_gets_tasks_that_rl_would_have_had_without_it():
    without, parts = module_tasks("mine", source("load")), module_tasks("mine", source("load"), with_teacher=True)
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
    parts = module_tasks("mine", source("grouped"), with_teacher=True)
    groups = [{task.question.partition(" [")[0] for task in tasks} for tasks in parts.values()]
    assert all(len(tasks) == 2 * len(group) > 0 for tasks, group in zip(parts.values(), groups, strict=True))
    kept = [{"kept_with": min(group)} for group in groups]
    others = [Task(id="x", dataset="other", question="?", answer="x", metadata=metadata) for metadata in kept]
    assert never_trained_on(others, config_of("grouped").envs) == [others[1]]


def test_split_of_a_row_is_kept_and_removed_from_the_metadata():
    parts = module_tasks("mine", source("named", scorer="math"))
    assert {part: [task.id for task in tasks] for part, tasks in parts.items()} == {
        "train": ["mine-a"],
        "eval": ["mine-b"],
        "demonstrations": ["mine-d"],
        "prm": ["mine-c"],
    }
    assert parts["eval"][0].answer == "y\nz"
    assert (parts["prm"][0].scorer, parts["demonstrations"][0].scorer) == ("integer", "math")
    assert {name for task in all_tasks("mine", source("named")) for name in task.metadata} == {"answer"}
    rows = all_tasks("mine", source("named"))
    assert [task.id for task in never_trained_on(rows, config_of("named").envs)] == ["mine-b"]


def test_ready_made_tasks_have_the_name_of_the_data_set_in_their_ids():
    for name in ("mine", "others"):
        tasks = all_tasks(name, source("numbered"))
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
        module_tasks("mine", source(name))
    assert "functions_of_the_test" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_training_evaluation_and_collection_are_disjoint_and_have_the_scorer_of_the_recipe():
    config = config_of("load", "reward.timeout_s=3", "evaluation.num_tasks=20")
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
    parts = module_tasks("sums", OwnDatasetConfig(**sums, scorer="integer"))
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
        module_tasks("sums", OwnDatasetConfig(**(sums | changed)))
    assert "\n" not in str(caught.value)


def test_broken_rows_of_the_hub_are_refused_and_repeated_ones_dropped(sums, tmp_path):
    folder = tmp_path / "mine" / "sums"
    write(folder / "test.jsonl", [{"other": 1}])
    with pytest.raises(ValueError, match=r"envs\.datasets\.sums"):
        module_tasks("sums", OwnDatasetConfig(**sums))
    write(folder / "train.jsonl", [row(n, 1) for n in [*range(30), 7] * 3])
    write(folder / "test.jsonl", [row(3, 1), row(99, 1)])
    read_source.cache_clear()
    parts = module_tasks("sums", OwnDatasetConfig(**sums, eval_split="test"))
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
