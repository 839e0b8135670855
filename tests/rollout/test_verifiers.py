"""Environments of verifiers: which of their tasks are trained on, and which are held out."""

import sys
from types import ModuleType

import pytest

from configs.envs import OwnDatasetConfig
from envs.datasets.custom import CustomSources, read_source

pytest.importorskip("verifiers")

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    secret: int

class Config(vf.TasksetConfig):
    prompts: list[str]
    secrets: list[int] = []

class Taskset(vf.Taskset[vf.Task[Data], Config]):
    def load(self):
        secrets = self.config.secrets or [1] * len(self.config.prompts)
        for number, (prompt, secret) in enumerate(zip(self.config.prompts, secrets, strict=True)):
            yield vf.Task[Data](Data(name=f"task {number}", prompt=prompt or None, secret=secret), self.config.task)

__all__ = ["Taskset"]
"""
TWELVE = [f"word{number // 2}" for number in range(12)]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    from rollout.agent.verifiers import VerifiersEnvironment

    (tmp_path / "prompts_of_the_test.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)

    def build(arguments, evaluation=None, **further):
        return VerifiersEnvironment("prompts-of-the-test", arguments=arguments, evaluation=evaluation, **further)

    return build


@pytest.fixture
def parts(monkeypatch):
    """The questions of an environment's tasks by their part, as a recipe has them."""

    def parted(environment):
        module = ModuleType("environment_of_the_test")
        module.tasks = environment.tasks
        monkeypatch.setitem(sys.modules, module.__name__, module)
        read_source.cache_clear()
        config = OwnDatasetConfig(source=f"{module.__name__}:tasks", scorer="own:score")
        found = CustomSources(datasets={"w": config}, with_teacher=True).parts("w")
        return {part: [task.question for task in tasks] for part, tasks in found.items()}

    return parted


def test_a_prompt_that_stands_twice_is_in_one_part(environment, parts):
    """Regression: ` [1]`, which tells the second apart, chose another half for it."""
    found = parts(environment({"prompts": TWELVE}))
    prompts = {part: {question.partition(" [")[0] for question in questions} for part, questions in found.items()}
    assert sorted(prompt for part in prompts.values() for prompt in part) == sorted({*TWELVE})
    assert sum(map(len, found.values())) == 12
    assert prompts["train"]
    assert prompts["eval"]


def test_a_task_that_is_also_held_out_or_taught_is_not_trained_on(environment, parts):
    found = parts(environment({"prompts": ["a", "b", "A", "d"]}, {"prompts": ["c", "B."]}, num_taught=1))
    assert found == {"train": ["d"], "demonstrations": ["a"], "eval": ["c", "B. [5]"], "prm": []}
