"""The project that `agentflow init` writes: small, complete, and ready to be trained."""

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


def test_starter_tasks_are_disjoint(project):
    from envs.datasets.custom import CustomSources

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
