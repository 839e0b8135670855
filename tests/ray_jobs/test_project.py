"""The project that `agentflow init` writes: small, complete, and ready to be trained."""

import json
import sys

import pytest

from configs.errors import UserError
from configs.loading import load_run_config
from envs.datasets.custom import CustomSources, read_source
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


def test_starter_tasks_are_disjoint(project):
    config = load_run_config(project / "recipe.toml", [])
    demonstrated = {one.task.id for one in cold_start_tasks(config)}
    sampler = training_tasks(config)
    trained = {sampler.task(ordinal).id for ordinal in range(400)}
    held_out = held_out_tasks(config.evaluation_mix, count=120, seed=0, custom=CustomSources.of(config))
    assert len(demonstrated) == config.cold_start.num_demonstrations
    assert not demonstrated & trained
    assert not {task.id for task in held_out} & (demonstrated | trained)


def test_existing_project_is_not_overwritten(project):
    before = (project / "agent.py").read_text()
    with pytest.raises(UserError):
        init(project)
    assert (project / "agent.py").read_text() == before


@pytest.mark.parametrize(
    ("content", "columns", "scorer", "answers"),
    [
        ("question,answer,level\n2+2?,4,easy\n3+3?,6,easy\n", (None, None), "integer", ["4", "6"]),
        ("input,output,answer\nCapital?,Paris,x\n", ("input", "output"), "text", ["Paris"]),
        ('{"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}\n', (None, None), "integer", ["4"]),
        ('{"prompt": "Capital?", "answer": ["Paris", "paris"]}\n', (None, None), "text", [["Paris", "paris"]]),
    ],
)
def test_project_of_a_file_draws_its_rows(tmp_path, content, columns, scorer, answers):
    file = tmp_path / ("pairs.jsonl" if content.startswith("{") else "pairs.csv")
    file.write_text(content)
    question, answer = columns
    init(tmp_path / "mine", data=file, question=question, answer=answer)
    rows = [json.loads(line) for line in (tmp_path / "mine" / "questions.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == answers
    config = load_run_config(tmp_path / "mine" / "recipe.toml", [])
    read_source.cache_clear()
    tasks, _ = read_source("questions", config.envs.datasets["questions"])
    assert [task.scorer for task in tasks] == [scorer] * len(rows)


def test_columns_without_a_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="--data"):
        init(tmp_path / "mine", question="input")


@pytest.mark.parametrize(("columns", "named"), [((None, None), "--question"), (("input", None), "--answer")])
def test_missing_column_names_the_option(tmp_path, columns, named):
    (tmp_path / "pairs.csv").write_text("input,output\nCapital?,Paris\n")
    question, answer = columns
    with pytest.raises(UserError, match=named):
        init(tmp_path / "mine", data=tmp_path / "pairs.csv", question=question, answer=answer)
    assert not (tmp_path / "mine").exists()
