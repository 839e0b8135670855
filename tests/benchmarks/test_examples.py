"""The examples: agents of other projects and environments of other libraries, behind the model endpoint."""

import ast
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import ScriptedEngine, ScriptedTokenizer

from benchmarks.endpoint_audit import Audit, LoggingEngine
from configs.loading import load_run_config
from envs.datasets.custom import CustomSources
from envs.datasets.sampler import cold_start_tasks
from learner.packing import samples_of
from ray_jobs.cli import main
from ray_jobs.starter.warehouse import article_of
from reward.scorers import score_answer
from rollout.agent.custom import CustomAgent, build_solving, rules_of
from rollout.agent.demonstrations import load_teacher
from rollout.chat import ChatFormat
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import TeacherWriter, engine_writers

FOLDER = Path(__file__).parents[2] / "examples"
CHAT = ChatFormat(ScriptedTokenizer())
pytestmark = pytest.mark.usefixtures("foreign_connections")


def called(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def config_of(name):
    """The config of the command in the example's docstring."""
    docstring = re.sub(r"\\\n *", "", ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())))
    overrides = shlex.split(re.search("agentflow train .*", docstring)[0])[3:]
    return load_run_config(FOLDER / "agents.toml", overrides)


async def play(config, task, writer):
    # The scripted tokenizer has one id per character.
    endpoint, rules = Endpoint(), replace(rules_of(config), max_tokens=200, max_context_tokens=20_000)
    solve = build_solving(config.agent, None)
    agent = CustomAgent(solve, endpoint, writer=writer, chat=CHAT, rules=rules, limits=config.rollout)
    trajectory = await agent.run(task, trajectory_id="g/0", group_id="g")
    endpoint.close()
    return trajectory


AGENTS = {
    "openai_agents": ((0, 1, 2),),
    "langgraph_react": ((0, 1, 2),),
    "smolagents_tools": ((0,), (1,), (2,)),
}
"""The branches of an attempt with three replies."""


@pytest.mark.parametrize("name", AGENTS)
async def test_agent_is_trained_on_what_the_engine_sampled(name):
    config = config_of(name)
    task = cold_start_tasks(config)[0].task
    order = task.question.rstrip("?").split()[-1]
    answer = task.answer if name != "smolagents_tools" else called("final_answer", answer=task.answer)
    replies = called("article_of", order=order), called("shelf_of", article=article_of(order)), answer
    engine = LoggingEngine(ScriptedEngine(replies))
    trajectory = await play(config, task, engine_writers(engine, 0.7))
    assert (trajectory.failure, trajectory.branches) == (None, AGENTS[name])
    assert score_answer(task, trajectory.answer) == 1.0
    audit = Audit()
    audit.check(engine.log["g/0"], samples_of(trajectory, [1.0] * 3, temperature=0.7), num_received=3)
    assert audit.clean
    assert audit.trained == audit.sampled


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("reply", [called("no_such_function", order="1"), called("article_of", no="1"), "I thi…", ""])
async def test_errors_of_the_model_score_zero(name, reply):
    config = config_of(name)
    task = cold_start_tasks(config)[0].task
    trajectory = await play(config, task, engine_writers(ScriptedEngine([reply] * 5), 0.7))
    assert (trajectory.failure, score_answer(task, trajectory.answer)) == (None, 0.0)


@pytest.mark.parametrize("name", AGENTS)
async def test_demonstrations_of_the_teacher_are_played(name):
    config = config_of(name)
    teach = load_teacher(config.cold_start)
    for generated in cold_start_tasks(config)[:6]:
        writer = lambda task, own_id: TeacherWriter(teach, "teach", task, CHAT)  # noqa: E731
        trajectory = await play(config, generated.task, writer)
        assert (trajectory.failure, len(trajectory.turns) in (1, 3)) == (None, True)


ENVIRONMENTS = [("reverse_text", "verifiers"), ("word_sequence_reversal", "reasoning_gym")]


@pytest.mark.parametrize(("recipe", "library"), ENVIRONMENTS)
def test_environment_passes_its_check(recipe, library, tmp_path):
    pytest.importorskip(library, exc_type=ImportError)
    assert main(["check", str(FOLDER / f"{recipe}.toml"), f"output_dir={tmp_path}"]) == 0


@pytest.mark.parametrize(("recipe", "library"), ENVIRONMENTS)
async def test_environment_scores_its_answers(recipe, library):
    pytest.importorskip(library, exc_type=ImportError)
    config = load_run_config(FOLDER / f"{recipe}.toml", [])
    held_out = CustomSources.of(config).tasks(next(iter(config.envs.mix)), "eval")
    assert len(held_out) >= config.evaluation.num_tasks
    task = held_out[0]
    right = task.question.rpartition(" ")[2][::-1] if recipe == "reverse_text" else task.answer
    for reply, score in ((right, 1.0), ("?", 0.0)):
        trajectory = await play(config, task, engine_writers(ScriptedEngine([reply]), 0.7))
        assert (trajectory.failure, score_answer(task, trajectory.answer)) == (None, score)


def test_no_library_connected_to_another_host(foreign_connections):
    assert foreign_connections == []
