"""Tasks that a function of one's own returns."""

import pytest

from configs.envs import EnvsConfig, OwnDatasetConfig
from configs.loading import load_run_config
from configs.plugins import OwnCodeError
from configs.reward import CollectConfig
from envs.datasets.own import OwnSources, module_tasks
from envs.datasets.registry import load_tasks
from envs.datasets.sampler import (
    cold_start_tasks,
    collection_tasks,
    evaluation_tasks,
    held_out_tasks,
    never_trained_on,
    training_tasks,
)
from envs.types import Task
from rollout.codec import trajectory_line, trajectory_of
from rollout.types import Trajectory

TASKS = """
from envs.types import Task

def load():
    for number in range(80):
        yield {"question": f"What is {number} and one?", "answer": number + 1, "source": "by hand"}

def named():
    return [
        {"id": "a", "question": "train one", "answer": "x", "split": "train", "scorer": "text"},
        {"id": "b", "question": "held out", "answer": ["y", "z"], "split": "eval", "scorer": "text"},
        {"id": "c", "question": "for the PRM", "answer": 3, "split": "prm", "scorer": "integer"},
    ]

def ready_made():
    return [Task(id=f"own-{n}", dataset="any", question=f"q{n}", answer="1", scorer="integer") for n in range(20)]

def numbered():
    return [Task(id=n, dataset="any", question=f"What is {n} and one?", answer=n + 1) for n in range(9)]

def no_question():
    return [Task(id="t", dataset="any", question=None, answer="x")]

def no_answer():
    return [Task(id="t", dataset="any", question="q", answer=None)]

def scored_by_an_object():
    return [Task(id="t", dataset="any", question="q", answer="x", scorer=len)]

def twice():
    return [{"question": "Who?", "answer": "x"}, {"question": "who?", "answer": "y"}]

def no_text():
    return [{"question": 3, "answer": "x"}]

def apart():
    return [
        {"question": "Who is it", "answer": "x", "split": "train"},
        {"question": "who is it?", "answer": "y", "split": "eval"},
    ]

def broken():
    raise OSError("no file")

def nothing():
    return []

def a_number():
    return 3

def needs(path):
    return []

def dated():
    import datetime
    return [{"question": "a?", "answer": "x", "when": datetime.date(2024, 5, 1)}]

def with_a_set():
    from envs.types import Task
    return [Task(id="t", dataset="d", question="a?", answer="x", metadata={"near": {1, 2}})]

def empty_columns():
    return [{"id": None, "question": f"What is {n} and one?", "answer": n + 1, "scorer": None} for n in range(9)]

def written():
    return [{"question": "Write double.", "answer": "def double(x):\\n    return 2 * x\\n"}]

def several():
    return [{"question": "Which?", "answer": ["1", "2"]}]

def kept_together():
    return [
        {"question": question, "answer": "x", **further}
        for n in range(40)
        for question, further in ((f"q{n}", {}), (f"q{n} [1]", {"kept_with": f"Q{n}?"}))
    ]

def kept_apart():
    return [
        {"question": "first", "answer": "x", "kept_with": "one", "split": "train"},
        {"question": "second", "answer": "x", "kept_with": "one", "split": "eval"},
    ]

def parts():
    named = {"rl": "train", "held_out": "eval", "shown": "demonstrations", "judged": "prm"}
    return [{"id": id, "question": f"{id}?", "answer": "x", "split": split} for id, split in named.items()]
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_tasks_of_the_test.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    module_tasks.cache_clear()


def source(name, **further):
    return OwnDatasetConfig(source=f"own_tasks_of_the_test:{name}", **further)


def config_of(name, *overrides):
    table = f"envs.datasets={{mine={{source='own_tasks_of_the_test:{name}'}}}}"
    return load_run_config(None, [table, "envs.mix={mine=1.0}", "reward.scorer=some:one", *overrides])


def test_rows_become_tasks_with_ids_and_further_columns():
    found = module_tasks("mine", source("load"))
    tasks = [task for part in found.values() for task in part]
    assert len({task.id for task in tasks}) == 80
    first = min(tasks, key=lambda task: int(task.answer))
    assert (first.id, first.dataset, first.answer) == ("mine-1", "mine", "1")
    assert (first.scorer, first.metadata) == (None, {"source": "by hand"})


@pytest.mark.parametrize(("name", "says"), [("dated", "'when' holds a date"), ("with_a_set", "'near' holds a set")])
def test_a_column_that_no_record_can_hold_is_refused(name, says):
    """Regression: no group of such a task could be written down, and the run ended with json's own error."""
    with pytest.raises(ValueError, match=rf"row 1: {says}, which is no JSON; make it a text, a number or a list"):
        module_tasks("mine", source(name))


def test_the_questions_decide_what_is_for_training_evaluation_and_the_prm():
    found = module_tasks("mine", source("load"))
    assert [part for part, tasks in found.items() if tasks] == ["train", "eval", "prm"]
    questions = [{task.question for task in tasks} for tasks in found.values()]
    assert sum(map(len, questions)) == len(set.union(*questions)) == 80
    assert len(found["prm"]) < len(found["train"]) < len(found["eval"]) + len(found["train"])


def test_tasks_that_are_kept_with_a_question_are_in_its_part_and_met_with_it():
    found = module_tasks("mine", source("kept_together"), with_teacher=True)
    twins = [{task.question.partition(" [")[0] for task in tasks} for tasks in found.values()]
    assert all(len(tasks) == 2 * len(named) > 0 for tasks, named in zip(found.values(), twins, strict=True))
    kept = [{"kept_with": min(part)} for part in twins]
    again = [Task(id="x", dataset="other", question="?", answer="x", metadata=one) for one in kept]
    assert never_trained_on(again, config_of("kept_together").envs) == [again[1]]


def test_a_teacher_gets_tasks_that_rl_would_have_had_without_it():
    without, found = module_tasks("mine", source("load")), module_tasks("mine", source("load"), with_teacher=True)
    assert {task.id for part in ("train", "demonstrations") for task in found[part]} == {
        task.id for task in without["train"]
    }
    assert found["train"]
    assert found["demonstrations"]
    assert (found["eval"], found["prm"]) == (without["eval"], without["prm"])


def test_a_teachers_tasks_are_none_that_rl_asks_and_have_the_recipes_scorer():
    alone = ["agent.function=mine:solve", "reward.credit=outcome", "cold_start.function=mine:teach"]
    config = config_of("load", *alone, "cold_start.num_demonstrations=6")
    demonstrated, sampler = cold_start_tasks(config), training_tasks(config)
    assert len({one.task.id for one in demonstrated}) == 6
    assert not {one.task.id for one in demonstrated} & {sampler.task(ordinal).id for ordinal in range(100)}
    assert {(one.task.scorer, one.plan) for one in demonstrated} == {("some:one", ())}


def test_a_teacher_needs_tasks_of_a_source_of_ones_own():
    alone = ["agent.function=mine:solve", "reward.credit=outcome", "cold_start.function=mine:teach"]
    with pytest.raises(ValueError, match=r"a teacher is given tasks of envs\.datasets .* envs\.mix names 'game24'"):
        cold_start_tasks(load_run_config(None, ["envs.mix={game24=1.0}", *alone]))


def test_a_split_of_ones_own_is_kept_and_no_column():
    found = module_tasks("mine", source("named"))
    assert {part: [task.id for task in tasks] for part, tasks in found.items()} == {
        "train": ["mine-a"],
        "eval": ["mine-b"],
        "demonstrations": [],
        "prm": ["mine-c"],
    }
    assert found["eval"][0].answer == "y\nz"
    assert found["prm"][0].metadata == {}


def test_ready_made_tasks_get_the_data_sets_name_and_have_it_in_their_ids():
    """Regression: those of two data sets could have the same ids, and only one of two was in report and viewer."""
    mine, others = (module_tasks(name, source("ready_made")) for name in ("mine", "others"))
    assert {task.dataset for part in mine.values() for task in part} == {"mine"}
    assert {task.id for part in mine.values() for task in part} == {f"mine-own-{number}" for number in range(20)}
    assert {task.id for part in others.values() for task in part} == {f"others-own-{number}" for number in range(20)}


def test_ready_made_tasks_may_have_numbers_as_ids_and_answers():
    """Regression: the answer of the first one ended the command in a traceback."""
    tasks = [task for part in module_tasks("mine", source("numbered")).values() for task in part]
    assert {(task.id, task.answer) for task in tasks} == {(f"mine-{n}", str(n + 1)) for n in range(9)}


def test_an_empty_column_says_no_more_than_one_that_is_missing():
    tasks = [task for part in module_tasks("mine", source("empty_columns", scorer="integer")).values() for task in part]
    assert {task.id for task in tasks} == {f"mine-{number}" for number in range(1, 10)}
    assert {task.scorer for task in tasks} == {"integer"}


def test_a_scorer_of_ones_own_reads_an_answer_as_it_is_written():
    """Regression: where reward.scorer scores, lines and spaces of an answer were lost."""
    code = "def double(x):\n    return 2 * x\n"

    def answers(**further):
        return [task.answer for tasks in module_tasks("mine", source("written", **further)).values() for task in tasks]

    assert answers() == answers(scorer="my_reward:score") == [code]
    assert answers(scorer="text") == ["def double(x): return 2 * x"]


def test_several_answers_are_refused_where_one_is_compared():
    with pytest.raises(ValueError, match=r"row 1: 'answer' must be a text or a whole number, got \['1', '2'\]"):
        module_tasks("mine", source("several", scorer="integer"))


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("twice", ValueError, r"the question 'who\?' stands in 2 rows"),
        ("no_text", ValueError, "own_tasks_of_the_test:no_text, row 1: 'question' must be a text, got 3"),
        ("no_question", ValueError, "own_tasks_of_the_test:no_question, row 1: 'question' must be a text, got None"),
        ("no_answer", ValueError, "row 1: 'answer' must be a text or a whole number, got None"),
        ("scored_by_an_object", ValueError, "row 1: 'scorer' must be a text such as .* got <built-in function len>"),
        ("apart", ValueError, "they ask the same but for case"),
        ("kept_apart", ValueError, "mine-2 is for 'eval' and mine-1 for 'train', and both have kept_with = 'one'"),
        ("broken", OwnCodeError, r"failed with OSError: no file \(own_tasks_of_the_test.py, line 43\)"),
        ("nothing", OwnCodeError, "returned no task"),
        ("a_number", OwnCodeError, "returned a int"),
        ("needs", OwnCodeError, r"is called as needs\(\) and does not take that: missing a required argument: 'path'"),
        ("missing", OwnCodeError, "envs.datasets.mine.source: .* cannot be imported: AttributeError"),
    ],
)
def test_what_is_no_task_set_is_one_line_that_says_where(name, error, says):
    with pytest.raises(error, match=says) as caught:
        module_tasks("mine", source(name))
    assert "\n" not in str(caught.value)


def test_training_evaluation_and_collection_never_meet_and_have_the_recipes_scorer(tmp_path):
    config = config_of("load", "reward.timeout_s=3")
    own, sampler = OwnSources.of(config), training_tasks(config)
    trained = [sampler.task(ordinal) for ordinal in range(100)]
    held_out = held_out_tasks(config.envs.mix, count=20, seed=0, own=own)
    collect = CollectConfig(num_tasks=5)
    collected = collection_tasks(config.envs, collect, seed=0, leak_report=tmp_path / "l.json", own=own)
    apart = [{task.id for task in tasks} for tasks in (trained, held_out, collected)]
    assert sum(map(len, apart)) == len(set.union(*apart))
    assert {(task.scorer, task.scoring_limit_s) for task in (*trained, *held_out, *collected)} == {("some:one", 3.0)}
    assert never_trained_on(trained, config.envs) == []
    assert never_trained_on(held_out, config.envs) == held_out


class ScriptedSources:
    datasets = dict.fromkeys("hgfedcba")

    def tasks(self, name, part):
        return [
            Task(id=f"{name}{number}", dataset=name, question=f"{name} {number}?", answer="x") for number in range(9)
        ]

    def scored(self, task):
        return task


def test_collected_tasks_come_in_the_order_of_the_mix_in_every_process(tmp_path):
    """Regression: a set gave the order, which another process has another way, and with it a PRM's training."""
    envs = EnvsConfig.model_construct(mix=dict.fromkeys(ScriptedSources.datasets, 1.0), data_path=None)
    collected = collection_tasks(
        envs, CollectConfig(num_tasks=8), seed=0, leak_report=tmp_path / "l.json", own=ScriptedSources()
    )
    assert "".join(task.dataset for task in collected) == "hgfedcba"


def test_all_that_is_not_held_out_is_met_by_training_the_demonstrations_too():
    rows = {task.id: task for tasks in module_tasks("mine", source("parts")).values() for task in tasks}
    kept = never_trained_on(rows.values(), config_of("parts").envs)
    assert [task.id for task in kept] == ["mine-held_out"]


def test_what_training_meets_is_told_without_asking_the_function_again():
    alone = ["agent.function=mine:solve", "reward.credit=outcome", "cold_start.function=mine:teach"]
    config = config_of("load", *alone, "evaluation.num_tasks=20")
    held_out = evaluation_tasks(config)
    assert never_trained_on(held_out, config.envs, with_teacher=True) == held_out
    assert module_tasks.cache_info().misses == 1


def test_nothing_of_a_file_that_is_all_held_out_is_met_by_training(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"question": "Who?", "answer": "x", "split": "eval"}')
    config = load_run_config(None, ["envs.mix={own_text=1}", f"envs.data_path={tmp_path}/mine.jsonl"])
    held_out = load_tasks("own_text", split="eval", count=1, seed=0, path=tmp_path / "mine.jsonl")
    assert never_trained_on(held_out, config.envs) == held_out


def test_the_recipes_scorer_is_for_built_in_tasks_too_and_a_tasks_own_comes_first():
    config = load_run_config(None, ["envs.mix={lookup=1.0}", "reward.scorer=some:one"])
    assert training_tasks(config).task(0).scorer == "some:one"
    own = OwnSources.of(config)
    assert own.scored(Task(id="t", dataset="d", question="q", answer="a", scorer="math")).scorer == "math"
    assert OwnSources().scored(Task(id="t", dataset="d", question="q", answer="a")).scorer is None


def test_scorer_and_columns_survive_the_record_of_a_trajectory():
    task = Task(id="t", dataset="d", question="q", answer="a", scorer="m:f", scoring_limit_s=2.0, metadata={"level": 3})
    for one in (task, Task(id="t", dataset="d", question="q", answer="a")):
        trajectory = Trajectory(id="x", group_id="g", task=one, turns=(), answer="a", stop_reason="answered")
        assert trajectory_of(trajectory_line(trajectory)).task == one
