"""The project that `agentflow init` writes: small, complete, and ready to be trained."""

import importlib
import sys

import pytest

from configs.errors import UserError
from configs.loading import load_run_config
from envs.datasets.sampler import cold_start_tasks, held_out_tasks, training_tasks
from ray_jobs.cli import init

MODULES = ("agent", "warehouse")


@pytest.fixture
def project(tmp_path, monkeypatch):
    init(tmp_path / "my-first.agent")
    monkeypatch.syspath_prepend(str(tmp_path / "my-first.agent"))
    yield tmp_path / "my-first.agent"
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def warehouse(project):
    return importlib.import_module("warehouse")


def test_the_run_has_the_folders_name_and_trains_the_agent_with_its_teacher_and_reward(project):
    config = load_run_config(project / "recipe.toml", [])
    assert config.name == "my-first.agent"
    assert (config.agent.function, config.cold_start.function) == ("agent:solve", "warehouse:teach")
    assert (config.envs.datasets["orders"].source, config.reward.scorer) == ("warehouse:tasks", "warehouse:score")


def test_there_are_tasks_enough_for_teacher_training_and_evaluation_and_none_is_in_two(project):
    from envs.datasets.custom import CustomSources

    config = load_run_config(project / "recipe.toml", [])
    demonstrated = {one.task.id for one in cold_start_tasks(config)}
    sampler = training_tasks(config)
    trained = {sampler.task(ordinal).id for ordinal in range(400)}
    held_out = held_out_tasks(config.evaluation_mix, count=120, seed=0, custom=CustomSources.of(config))
    assert len(demonstrated) == config.cold_start.num_demonstrations
    assert not demonstrated & trained
    assert not {task.id for task in held_out} & (demonstrated | trained)


def test_the_two_functions_lead_from_every_order_to_its_shelf(warehouse):
    for task in warehouse.tasks():
        assert warehouse.shelf_of(warehouse.article_of(task["id"])) == task["answer"]
    assert warehouse.article_of("no order") == "unknown order"


async def test_the_teacher_is_right_in_two_of_seven_tasks(warehouse, project):
    """The demonstrations leave something to learn."""
    from types import SimpleNamespace

    agent = importlib.import_module("agent")
    right = 0
    for row in warehouse.tasks():
        task, messages = SimpleNamespace(**row), [{"role": "user", "content": row["question"]}]
        while not isinstance(said := await warehouse.teach(task, messages, agent.TOOLS), str):
            function = SimpleNamespace(**said["tool_calls"][0]["function"])
            messages += [said, {"role": "tool", "content": agent.result_of(function)}]
        right += warehouse.score(task, said)
    assert 0.23 < right / len(warehouse.tasks()) < 0.34


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("shelf_of", '{"article": "red owls"}', "unknown article"),
        ("fly", "{}", "no such function, or wrong arguments"),
        ("shelf_of", "{", "no such function, or wrong arguments"),
        ("shelf_of", '{"shelf": "A1"}', "no such function, or wrong arguments"),
        ("shelf_of", "3", "no such function, or wrong arguments"),
    ],
)
def test_whatever_the_model_calls_is_answered_with_a_text(project, name, arguments, result):
    from types import SimpleNamespace

    agent = importlib.import_module("agent")
    assert agent.result_of(SimpleNamespace(name=name, arguments=arguments)) == result


def test_nothing_is_written_over(project):
    before = (project / "agent.py").read_text()
    with pytest.raises(UserError, match="already exists"):
        init(project)
    assert (project / "agent.py").read_text() == before


def test_a_folder_whose_name_is_no_runs_name_is_refused_and_not_made(tmp_path):
    with pytest.raises(UserError, match="'a b'"):
        init(tmp_path / "a b")
    assert not (tmp_path / "a b").exists()
