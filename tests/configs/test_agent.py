"""Custom agents in a recipe, and the settings that do not apply to them."""

import pytest

from configs.errors import UserError
from configs.learner import FileConfig, TeacherConfig
from configs.loading import load_run_config
from configs.rollout import CommandAgentConfig, FunctionAgentConfig

ALONE = ["reward.credit=outcome", "cold_start.num_demonstrations=0"]


def test_the_key_decides_the_type_of_an_agent():
    function = load_run_config(None, ["agent.function=mine:solve", *ALONE])
    assert function.agent == FunctionAgentConfig(function="mine:solve")
    command = load_run_config(None, ["agent.command=python mine.py", "agent.model=gpt", *ALONE])
    assert command.agent == CommandAgentConfig(command="python mine.py", model="gpt")
    assert function.names_code
    assert command.names_code


@pytest.mark.parametrize("word", ["TAVILY_API_KEY=canary0123456789", "tvly-canary0123456789"])
def test_a_command_holds_no_key(word):
    with pytest.raises(UserError, match=r"^agent\.command: ") as caught:
        load_run_config(None, [f"agent.command=env {word} python mine.py", *ALONE])
    assert "canary" not in str(caught.value)


def test_the_key_decides_the_type_of_a_cold_start():
    own = ["agent.function=mine:solve", "reward.credit=outcome"]
    taught = load_run_config(None, [*own, "cold_start.function=mine:teach"]).cold_start
    assert taught == TeacherConfig(function="mine:teach")
    recorded = load_run_config(None, [*own, "cold_start.path=chats.jsonl", "cold_start.num_passes=3"]).cold_start
    assert recorded == FileConfig(path="chats.jsonl", num_passes=3)
    with pytest.raises(UserError, match=r"cold_start\.wrong_share"):
        load_run_config(None, [*own, "cold_start.function=mine:teach", "cold_start.wrong_share=0.5"])


def test_the_planner_has_no_teacher():
    with pytest.raises(UserError, match=r"cold_start\.type"):
        load_run_config(None, ["cold_start.function=mine:teach"])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("cold_start.num_demonstrations=8", "cold_start"),
        ('backend={type="ollama", model="m"}', "backend"),
        ("agent.command=python mine.py", "agent.command"),
    ],
)
def test_a_setting_that_needs_the_planner_is_refused(override, key):
    with pytest.raises(UserError) as caught:
        load_run_config(None, ["agent.function=mine:solve", *ALONE, override])
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override", ["agent.max_steps=6", "agent.format_retries=0", "agent.memory=in_process", "agent.lockstep=false"]
)
def test_settings_of_the_planner_are_unknown_to_a_custom_agent(override):
    with pytest.raises(UserError, match=override.partition("=")[0]):
        load_run_config(None, ["agent.function=mine:solve", *ALONE, override])


def test_a_custom_agent_is_never_in_lockstep():
    assert load_run_config(None, ["pipeline_depth=0"]).in_lockstep
    assert not load_run_config(None, ["agent.function=mine:solve", *ALONE, "pipeline_depth=0"]).in_lockstep


def test_a_prm_goes_with_any_agent_where_continuations_label_its_steps():
    own = ["agent.function=mine:solve", "cold_start.num_demonstrations=0"]
    assert load_run_config(None, [*own, "label.type=monte_carlo"]).trains_prm
    assert load_run_config(None, [*own, "reward.credit.prm_path=prm"]).reward.prm_path == "prm"


def test_limits_of_the_planner_do_not_apply_to_custom_agents():
    long = ["rollout.max_turn_tokens=400", "rollout.engine.max_model_len=1024"]
    with pytest.raises(UserError, match="max_turn_tokens"):
        load_run_config(None, long)
    load_run_config(None, [*long, "agent.function=mine:solve", *ALONE])
