"""Custom code of a recipe: found next to the recipe, and checked before the start."""

import sys

import pytest

from configs.errors import UserError
from configs.loading import load_run_config
from configs.plugins import OwnCodeError, failure, load_own
from ray_jobs.run.origin import with_absolute_paths
from ray_jobs.run.preflight import check_before_acting

TASKS = """
def load():
    return [{"question": f"q{n}", "answer": "x"} for n in range(40)]
"""
SCORERS = """
def right(task, answer):
    return answer == task.answer

def wild(task, answer):
    return 7
"""
RECIPE = """
[envs]
actions = ["think", "answer"]
mix = { mine = 1.0 }
datasets = { mine = { source = "tasks_beside_the_recipe:load" } }
[cold_start]
num_demonstrations = 0
[evaluation]
num_tasks = 10
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "tasks_beside_the_recipe.py").write_text(TASKS)
    (folder / "scorers_beside_the_recipe.py").write_text(SCORERS)
    (folder / "mine.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder / "mine.toml"


def check(recipe, *overrides):
    check_before_acting(load_run_config(recipe, overrides), draws_tasks=True)


def test_modules_next_to_the_recipe_are_found(recipe, monkeypatch):
    config = load_run_config(recipe.relative_to(recipe.parents[1]), ["reward.scorer=scorers_beside_the_recipe:right"])
    assert config.code_path == "recipes"
    assert load_own(config.reward.scorer, key="reward.scorer").__name__ == "right"
    assert with_absolute_paths(config).code_path == str(recipe.parent)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    # The working directory of a submitted job travels, and lies elsewhere on each machine.
    assert with_absolute_paths(config).code_path == "recipes"


@pytest.mark.parametrize(
    ("overrides", "error", "says"),
    [
        ([], UserError, r"envs\.datasets\.mine\.scorer"),
        (["reward.scorer=scorers_beside_the_recipe:wild"], UserError, "scorers_beside_the_recipe:wild"),
        (["envs.datasets.mine.source=no_such_module:load"], OwnCodeError, "envs.datasets.mine"),
        (['learner.loss={type="custom", function="absent:loss"}'], OwnCodeError, "learner.loss.function"),
    ],
)
def test_custom_code_that_cannot_work_is_rejected_in_one_line(recipe, overrides, error, says):
    with pytest.raises(error, match=says) as caught:
        check(recipe, *overrides)
    assert "\n" not in str(caught.value)


def test_error_in_a_library_names_the_line_of_the_custom_code(tmp_path, monkeypatch):
    (tmp_path / "reads_json.py").write_text("import json\n\ndef solve():\n    return json.loads('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as caught:
        load_own("reads_json:solve", key="agent.function")()
    assert failure(caught.value).endswith("(reads_json.py, line 4)")


def test_a_key_is_not_advised_to_an_agent_that_makes_a_client_of_its_own(recipe, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (recipe.parent / "own_client.py").write_text("import openai\nCLIENT = openai.OpenAI()\n")
    load_run_config(recipe)
    with pytest.raises(OwnCodeError, match="no client at import"):
        load_own("own_client:solve", key="agent.function")
