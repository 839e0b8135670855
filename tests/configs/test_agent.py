"""An agent of one's own in a recipe: what it is, and what does not go with it."""

import pytest

from configs.learner import FileConfig, TeacherConfig
from configs.loading import ConfigError, load_run_config
from configs.rollout import CommandAgentConfig, FunctionAgentConfig, PlannerAgentConfig

ALONE = ["reward.credit=outcome", "cold_start.num_demonstrations=0"]


def test_the_planner_acts_where_nobody_else_is_named():
    assert load_run_config(None).agent == PlannerAgentConfig()


def test_a_function_or_a_command_says_by_its_key_what_it_is():
    function = load_run_config(None, ["agent.function=mine:solve", *ALONE])
    assert function.agent == FunctionAgentConfig(function="mine:solve")
    command = load_run_config(None, ["agent.command=python mine.py", "agent.model=gpt", *ALONE])
    assert command.agent == CommandAgentConfig(command="python mine.py", model="gpt")
    assert function.names_code
    assert command.names_code


@pytest.mark.parametrize("word", ["TAVILY_API_KEY=canary0123456789", "tvly-canary0123456789"])
def test_a_command_holds_no_key(word):
    with pytest.raises(ConfigError, match=r"^agent\.command: ") as caught:
        load_run_config(None, [f"agent.command=env {word} python mine.py", *ALONE])
    assert "canary" not in str(caught.value)


def test_a_cold_start_says_by_its_key_where_its_demonstrations_are_from():
    own = ["agent.function=mine:solve", "reward.credit=outcome"]
    taught = load_run_config(None, [*own, "cold_start.function=mine:teach"]).cold_start
    assert taught == TeacherConfig(function="mine:teach")
    recorded = load_run_config(None, [*own, "cold_start.path=chats.jsonl", "cold_start.num_passes=3"]).cold_start
    assert recorded == FileConfig(path="chats.jsonl", num_passes=3)
    with pytest.raises(ConfigError, match=r"type = 'teacher' has .* 'plans' has it"):
        load_run_config(None, [*own, "cold_start.function=mine:teach", "cold_start.wrong_share=0.5"])


def test_the_planner_has_no_teacher():
    with pytest.raises(ConfigError, match=r"cold_start\.type = 'teacher' needs a custom agent"):
        load_run_config(None, ["cold_start.function=mine:teach"])


def test_not_both():
    with pytest.raises(ConfigError, match=r"unknown key 'agent\.command': type = 'function' has"):
        load_run_config(None, ["agent.function=mine:solve", "agent.command=python mine.py", *ALONE])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("reward.credit=outcome_gated", "needs label.type = monte_carlo for a PRM"),
        ("cold_start.num_demonstrations=8", "needs cold_start.type = 'teacher' or 'file', or cold_start.num_demon"),
        ('backend={type="ollama", model="m"}', "needs backend = vllm"),
    ],
)
def test_what_needs_a_plan_or_the_planner_is_refused_in_one_sentence(override, says):
    with pytest.raises(ConfigError, match=r"agent\.type = 'function' needs ") as caught:
        load_run_config(None, ["agent.function=mine:solve", *ALONE, override])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override", ["agent.max_steps=6", "agent.format_retries=0", "agent.memory=in_process", "agent.lockstep=false"]
)
def test_settings_of_the_planner_are_unknown_to_a_custom_agent(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_run_config(None, ["agent.function=mine:solve", *ALONE, override])


def test_a_custom_agent_is_never_in_lockstep():
    assert load_run_config(None, ["pipeline_depth=0"]).in_lockstep
    assert not load_run_config(None, ["agent.function=mine:solve", *ALONE, "pipeline_depth=0"]).in_lockstep


def test_a_prm_goes_with_any_agent_where_continuations_label_its_steps():
    own = ["agent.function=mine:solve", "cold_start.num_demonstrations=0"]
    assert load_run_config(None, [*own, "label.type=monte_carlo"]).trains_prm
    assert load_run_config(None, [*own, "reward.credit.prm_path=prm"]).reward.prm_path == "prm"


def test_steps_and_turn_length_of_the_planner_bind_nobody_else():
    long = ["rollout.max_turn_tokens=400", "rollout.engine.max_model_len=1024"]
    with pytest.raises(ConfigError, match="leaves no room for prompts"):
        load_run_config(None, long)
    load_run_config(None, [*long, "agent.function=mine:solve", *ALONE])
