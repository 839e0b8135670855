"""What the planner is told: byte for byte as ever by default, and what a recipe says in its place."""

import json
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.loading import load_run_config, render_config
from configs.run import RunConfig
from envs.tools.toolbox import Toolbox
from envs.types import Task
from rollout.agent.planner import opening, planner_grammar, planner_schema

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "planner_prompt.json").read_text())
STEPS = [
    {"thought": "Multiply.", "action": "code", "action_input": "6*7", "result": "42"},
    {"thought": "That is it.", "action": "answer", "action_input": "42"},
]
EXAMPLE = """Task: What is 6 by 7?
{"thought":"Multiply.","action":"code","action_input":"6*7"}
Result: 42
{"thought":"That is it.","action":"answer","action_input":"42"}"""


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def examples(tmp_path):
    return write(tmp_path / "examples.jsonl", {"question": "What is 6 by 7?", "steps": STEPS})


def test_by_default_prompt_grammar_and_schema_are_the_very_bytes_that_they_were(chat):
    config = load_run_config(None)
    task = Task(id="t", dataset="lookup", question=GOLDEN["question"], answer="")
    with Toolbox(config.envs) as toolbox, toolbox.episode() as tools:
        system, user = opening(tools, task, config.planner.max_steps, GOLDEN["hints"], config.planner.prompt)
    assert (system, user) == (GOLDEN["system"], GOLDEN["user"])
    assert list(chat.prompt(system, user)) == GOLDEN["token_ids"]
    assert planner_grammar(config.envs.actions) == GOLDEN["grammar"]
    assert json.dumps(planner_schema(config.envs.actions)) == json.dumps(GOLDEN["schema"])


def test_a_run_keeps_what_the_file_held_when_it_began(examples, tmp_path):
    config = load_run_config(None, [f"agent.prompt.examples={examples}", "agent.prompt.instructions=Be brief."])
    examples.unlink()
    assert config.planner.prompt.examples == (EXAMPLE,)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    recipe = tmp_path / "again.toml"
    recipe.write_text(render_config(config))
    assert load_run_config(recipe) == config


@pytest.mark.parametrize(
    "row",
    [
        "no json",
        {"question": "q"},
        {"question": "q", "steps": []},
        {"question": "q", "steps": STEPS[:1]},
        {"question": "q", "steps": [{**STEPS[0], "result": None}, {**STEPS[1], "result": "x"}]},
        {"question": "q", "steps": [STEPS[1], STEPS[1]]},
    ],
)
def test_a_file_that_holds_no_examples_is_refused_in_one_line(tmp_path, row):
    path = write(tmp_path / "examples.jsonl", row)
    with pytest.raises(UserError, match=r"agent\.prompt\.examples") as caught:
        load_run_config(None, [f"agent.prompt.examples={path}"])
    assert "\n" not in str(caught.value)
