"""Custom agents in a recipe, and the settings that do not apply to them."""

import pytest

from configs.errors import UserError
from configs.learner import FileConfig, TeacherConfig
from configs.loading import load_run_config
from configs.rollout import CommandAgentConfig, FunctionAgentConfig

ALONE = ["reward.credit=outcome", "cold_start.num_demonstrations=0"]


OWN = ["agent.function=mine:solve", *ALONE]


def test_the_key_decides_the_type_of_an_agent_and_of_a_cold_start():
    assert load_run_config(None, OWN).agent == FunctionAgentConfig(function="mine:solve")
    command = load_run_config(None, ["agent.command=python mine.py", "agent.model=gpt", *ALONE])
    assert command.agent == CommandAgentConfig(command="python mine.py", model="gpt")
    assert load_run_config(None, OWN).names_code
    assert command.names_code
    taught = load_run_config(None, [*OWN[:2], "cold_start.function=mine:teach"]).cold_start
    assert taught == TeacherConfig(function="mine:teach")
    recorded = load_run_config(None, [*OWN[:2], "cold_start.path=chats.jsonl", "cold_start.num_passes=3"]).cold_start
    assert recorded == FileConfig(path="chats.jsonl", num_passes=3)


@pytest.mark.parametrize("word", ["TAVILY_API_KEY=canary0123456789", "tvly-canary0123456789"])
def test_a_command_holds_no_key(word):
    with pytest.raises(UserError, match=r"^agent\.command: ") as caught:
        load_run_config(None, [f"agent.command=env {word} python mine.py", *ALONE])
    assert "canary" not in str(caught.value)


LONG = ["rollout.max_turn_tokens=400", "rollout.engine.max_model_len=1024"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["cold_start.function=mine:teach"], "cold_start.type"),
        ([*OWN[:2], "cold_start.function=mine:teach", "cold_start.lazy_share=0.5"], "cold_start.lazy_share"),
        ([*OWN, "cold_start.num_demonstrations=8"], "cold_start"),
        ([*OWN, 'backend={type="ollama", model="m"}'], "backend"),
        ([*OWN, "agent.command=python mine.py"], "agent.command"),
        ([*OWN, "agent.max_steps=6"], "agent.max_steps"),
        (LONG, "max_turn_tokens"),
    ],
)
def test_a_setting_that_needs_the_planner_or_a_custom_agent_is_refused_without_it(overrides, key):
    with pytest.raises(UserError) as caught:
        load_run_config(None, overrides)
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_holds_for_the_planner_alone():
    load_run_config(None, [*LONG, *OWN])
    assert load_run_config(None, ["pipeline_depth=0"]).in_lockstep
    assert not load_run_config(None, [*OWN, "pipeline_depth=0"]).in_lockstep


def test_a_prm_goes_with_any_agent_where_continuations_label_its_steps():
    own = ["agent.function=mine:solve", "cold_start.num_demonstrations=0"]
    assert load_run_config(None, [*own, "label.type=monte_carlo", "reward.credit=outcome_guided"]).trains_prm
    assert load_run_config(None, [*own, "reward.credit.prm_path=prm"]).reward.prm_path == "prm"
