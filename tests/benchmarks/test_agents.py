"""Agents of other projects, unchanged, behind the model endpoint: they play, are taught, and reach out nowhere."""

import ast
import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from scripted import ScriptedEngine, ScriptedTokenizer

from benchmarks.endpoint.attempts import LoggingEngine
from benchmarks.endpoint_audit import Auditor
from configs.loading import load_run_config
from configs.run import RunConfig
from envs.datasets.sampler import cold_start_tasks
from learner.samples import samples_of
from ray_jobs.commands.starter.warehouse import article_of
from ray_jobs.phases.cold_start import kept_demonstrations, scores_of
from reward.scorers import score_answer
from rollout.agent.demonstrations import load_teacher
from rollout.agent.custom import CustomAgent, build_solving, rules_of
from rollout.chat import ChatFormat
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import EngineWriter, ReplayWriter, TeacherWriter, engine_writers
from rollout.replay import as_replay, repeats

FOLDER = Path(__file__).parents[2] / "benchmarks" / "agents"
pytestmark = pytest.mark.usefixtures("elsewhere")
CHAT = ChatFormat(ScriptedTokenizer())


@dataclass(frozen=True)
class Clerk:
    """An agent, how it ends an attempt, and the branches of one with three replies."""

    config: RunConfig
    in_words: bool
    branches: tuple[tuple[int, ...], ...]

    def answering(self, shelf):
        return shelf if self.in_words else called("final_answer", answer=shelf)

    def behind(self, endpoint, writer):
        # The scripted tokenizer has an id per character.
        rules = replace(rules_of(self.config), max_tokens=200, max_context_tokens=20_000)
        return CustomAgent(
            build_solving(self.config.agent, None), endpoint, writer=writer, chat=CHAT, rules=rules, timeout_s=120
        )


ONE, EACH = ((0, 1, 2),), ((0,), (1,), (2,))
CLERKS = {"openai_agents": (True, ONE), "langgraph_react": (True, ONE), "smolagents_tools": (False, EACH)}


def called(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture(params=CLERKS)
def clerk(request):
    return Clerk(load_run_config(FOLDER / "recipe.toml", overrides_of(request.param)), *CLERKS[request.param])


def overrides_of(name):
    """Those of the command that its docstring begins with."""
    said = re.sub(r"\\\n *", "", ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())))
    return shlex.split(re.search("agentflow train .*", said)[0])[3:]


@pytest.fixture(autouse=True, scope="module")
def traced():
    """The libraries are asked to trace."""
    told = {"OPENAI_API_KEY": "k", "LANGSMITH_TRACING": "true", "LANGSMITH_API_KEY": "k"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        yield


def first_task(clerk):
    return cold_start_tasks(clerk.config)[0].task


async def attempt(clerk, task, *texts):
    """The trajectory, and what the engine sampled for it."""
    engine, endpoint = LoggingEngine(ScriptedEngine(texts)), Endpoint()
    trajectory = await clerk.behind(endpoint, engine_writers(engine, 0.7)).run(task, trajectory_id="g/0", group_id="g")
    endpoint.close()
    return trajectory, engine.log.get("g/0", [])


def right_replies(clerk, task):
    order = task.question.rstrip("?").split()[-1]
    look_ups = called("article_of", order=order), called("shelf_of", article=article_of(order))
    return *look_ups, clerk.answering(task.answer)


async def test_it_plays_to_its_end_and_what_is_trained_is_what_the_engine_sampled(clerk):
    task = first_task(clerk)
    trajectory, log = await attempt(clerk, task, *right_replies(clerk, task))
    assert (trajectory.failure, trajectory.stop_reason, trajectory.branches) == (None, "answered", clerk.branches)
    assert score_answer(task, trajectory.answer) == 1.0
    auditor = Auditor(ScriptedTokenizer())
    auditor.check(log, samples_of(trajectory, [1.0] * 3, temperature=0.7), num_received=3)
    assert auditor.audit.clean
    assert auditor.audit.trained == auditor.audit.sampled == sum(len(one.token_ids) for one in log)


async def test_it_repeats_an_attempt_call_by_call_and_goes_on_another_way(clerk):
    task = first_task(clerk)
    *look_ups, right = right_replies(clerk, task)
    root, _ = await attempt(clerk, task, *look_ups, clerk.answering("not found"))
    engine, endpoint = ScriptedEngine([right]), Endpoint()
    live = EngineWriter(engine, trajectory_id="g/8", temperature=0.7)
    replaying = clerk.behind(endpoint, lambda task, own_id: ReplayWriter(live, root.planner_turns, 2))
    fork = as_replay(await replaying.run(task, trajectory_id="g/8", group_id="g"), root.planner_turns[:2])
    endpoint.close()
    assert repeats(fork, root, 2)
    assert (score_answer(task, root.answer), score_answer(task, fork.answer)) == (0.0, 1.0)
    assert [len(engine.requests), [turn.trainable for turn in fork.turns]] == [1, [False, False, True]]
    # One that rewrites its history gives no result of a tool back.
    assert [turn.tool_result is not None for turn in root.turns] == [clerk.in_words, clerk.in_words, False]


async def test_a_wrong_shelf_scores_nothing(clerk):
    task = first_task(clerk)
    trajectory, _ = await attempt(clerk, task, clerk.answering("not found"))
    assert (trajectory.failure, score_answer(task, trajectory.answer)) == (None, 0.0)


NO_SUCH = called("no_such_function", order="1")
NO_OBJECT = '<tool_call>\n{"name": "article_of", "arguments": [1]}\n</tool_call>'


@pytest.mark.parametrize("said", [NO_SUCH, NO_OBJECT, called("article_of", no="1"), "", "I thi…", called("shelf_of")])
async def test_a_model_that_errs_in_every_reply_is_wrong_and_not_unscored(clerk, said):
    task = first_task(clerk)
    trajectory, _ = await attempt(clerk, task, *[said] * 5)
    assert (trajectory.failure, score_answer(task, trajectory.answer)) == (None, 0.0)


async def test_two_calls_in_one_reply_are_both_answered(clerk):
    task = first_task(clerk)
    first, *later = right_replies(clerk, task)
    trajectory, _ = await attempt(clerk, task, f"{called('article_of', order='x')}\n{first}", *later)
    assert (trajectory.failure, score_answer(task, trajectory.answer)) == (None, 1.0)


async def test_all_that_its_teacher_says_is_imitated(clerk):
    teach = load_teacher(clerk.config.cold_start)
    endpoint, tasks = Endpoint(), [one.task for one in cold_start_tasks(clerk.config)[:12]]
    agent = clerk.behind(endpoint, lambda task, own_id: TeacherWriter(teach, "teach", task, CHAT))
    played = [await agent.run(task, trajectory_id=task.id, group_id="demonstrations") for task in tasks]
    endpoint.close()
    assert kept_demonstrations(played, scores_of(played), min_score=0.0) == (played, None)
    assert {len(one.turns) for one in played} == {1, 3}
    assert all(score_answer(one.task, one.answer) == (len(one.turns) == 3) for one in played)


def test_no_library_reached_out(elsewhere):
    from agents.tracing import flush_traces
    from langchain_core.tracers.langchain import wait_for_all_tracers

    flush_traces()
    wait_for_all_tracers()
    assert elsewhere == []
