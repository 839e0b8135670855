"""Forks of agents of one's own: the worker repeats what they said, samples on, and leaves out who goes another way."""

import itertools
import sys

import pytest
from scripted import ScriptedTokenizer, make_task, text_of

from configs.learner import LearnerConfig
from configs.loading import load_run_config
from configs.rollout import FirstCallRestartsConfig, RandomRestartsConfig
from learner.packing import build_batch
from learner.samples import build_samples
from reward.credit import turn_advantages
from reward.judging import GroupJudge, OutcomeReward, group_result
from reward.labels.plan import fresh_error
from reward.prm.scorer import PrmScorer
from reward.restarts import Restarter
from reward.stored import scored_group_of, stored_group
from rollout.chat import ChatFormat
from rollout.records import trajectory_of, trajectory_record
from rollout.restarts import Anchor
from rollout.types import Completion
from rollout.worker import Worker

AGENTS = """
import asyncio
import itertools
import json
import random

COUNT = itertools.count()
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer"}}}}}

async def solve(task, client, told=lambda given: str(given + 1)):
    messages = [{"role": "user", "content": task.question}]
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return said.content
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": told(json.loads(call.function.arguments)["a"])}
            for call in said.tool_calls
        ]

async def has_another_state(task, client):
    return await solve(task, client, lambda given: str(next(COUNT)))

async def swallows(task, client):
    try:
        return await has_another_state(task, client)
    except Exception:
        return "42"

async def stops_the_second_time(task, client):
    if next(COUNT) < 2:
        return await solve(task, client)
    asked = [{"role": "user", "content": task.question}]
    await client.chat.completions.create(model="policy", messages=asked, tools=[ADD])
    return "42"

async def asks_side_by_side(task, client):
    async def ask(text):
        messages = [{"role": "user", "content": text}]
        reply = await client.chat.completions.create(model="policy", messages=messages)
        return reply.choices[0].message.content

    names = ["x", "y", "z"]
    random.shuffle(names)
    said = dict(zip(names, await asyncio.gather(*map(ask, names))))
    return await ask(" ".join(said[name] for name in sorted(said)))
"""
PROGRAM = """
import asyncio, json, sys
from types import SimpleNamespace

sys.path.insert(0, {folder!r})
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from agents_that_fork import solve

task = SimpleNamespace(**json.load(sys.stdin))
client = AsyncOpenAI(http_client=DefaultAsyncHttpxClient(trust_env=False))
print(asyncio.run(solve(task, client)))
"""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
JUDGE = GroupJudge(OutcomeReward(LearnerConfig(), max_turn_tokens=100))


class PolicyEngine:
    """Says what `policy` makes of a prompt's text; each of its tokens has a log-prob of its own."""

    policy_version = 3

    def __init__(self, policy):
        self.policy = policy
        self.prompts = []
        self.released = []

    async def generate(self, request):
        text = text_of(request.prompt_token_ids)
        self.prompts.append(text)
        said = self.policy(text)
        ids = (*map(ord, said), 1)
        logprobs = tuple(-1.0 - len(self.prompts) - place for place in range(len(ids)))
        return Completion(
            token_ids=ids, logprobs=logprobs, text=said, finish_reason="stop", policy_version=self.policy_version
        )

    def release(self, trajectory_id):
        self.released.append(trajectory_id)

    def close(self):
        pass


class Policy:
    """Calls a function first, and then answers with the next of `answers`."""

    def __init__(self, *answers):
        self.answers = iter(answers)

    def __call__(self, text):
        return next(self.answers) if "<tool_response>" in text else CALL


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker over an engine that asks `policy`, and the agent of this name."""
    (tmp_path / "agents_that_fork.py").write_text(AGENTS)
    (tmp_path / "program_that_forks.py").write_text(PROGRAM.format(folder=str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    opened = []

    def build(agent, policy):
        config = load_run_config(
            None,
            [
                *(agent, f"code_path={tmp_path}", "reward.credit=outcome", "cold_start.num_demonstrations=0"),
                *("rollout.restarts=first_call", "rollout.episode_timeout_s=120"),
            ],
        )
        monkeypatch.setattr("rollout.worker.VllmEngine", lambda *_, **__: PolicyEngine(policy))
        monkeypatch.setattr("rollout.worker.build_chat", lambda _: ChatFormat(ScriptedTokenizer()))
        opened.append(Worker(config, tmp_path, index=0))
        return opened[-1]

    yield build
    for one in opened:
        one.close()
    sys.modules.pop("agents_that_fork", None)


def function(name):
    return f"agent.function=agents_that_fork:{name}"


async def revived(worker, config=None, judge=JUDGE):
    """What becomes of a group of two wrong attempts."""
    group = await worker.run_group(make_task(), "g", 2)
    restarter = Restarter(config or FirstCallRestartsConfig(), worker, judge, seed=0)
    return await restarter.revive(await judge.judge(group))


@pytest.mark.parametrize("agent", [function("solve"), "agent.command=python program_that_forks.py"])
async def test_forks_repeat_the_first_call_and_are_trained_on_what_comes_after(worker, agent):
    """z of (1, 0) with the sample standard deviation is 0.7071."""
    own = worker(agent, Policy("1", "2", "42", "1"))
    found = await revived(own)
    assert {name: num for name, num in found.facts.items() if not name.endswith("_s")} == {
        "dead_groups": 1,
        "anchored_groups": 1,
        "revived_groups": 1,
        "forks": 2,
        "fork_tokens": len("42") + len("1") + 2,
        "inexact_forks": 0,
    }
    root = next(one for one in found.scored.roots.group.trajectories if one.id == found.scored.anchor.trajectory_id)
    for fork in found.scored.group.trajectories:
        again, new = fork.turns
        assert (again.completion, again.tool_result) == (root.turns[0].completion, root.turns[0].tool_result)
        assert (again.trainable, new.trainable) == (False, True)
        assert new.prompt_token_ids == root.turns[1].prompt_token_ids
        assert fork.branches == ((0, 1),)
    assert [one.id for one in found.scored.group.trajectories] == ["g/2", "g/3"]
    assert sorted(one.answer for one in found.scored.group.trajectories) == ["1", "42"]
    assert sum("<tool_response>" not in prompt for prompt in own.engine.prompts) == 2
    assert set(own.engine.released) == {"g/0", "g/1", "g/2", "g/3"}

    advantages = turn_advantages(found.scored, credit="outcome", prm_weight=0.0)
    assert sorted(advantages) == [[0.0, pytest.approx(-0.70710578)], [0.0, pytest.approx(0.70710578)]]
    samples = build_samples(found.scored.group, advantages, temperature=1.0)
    assert sorted(sample.num_loss_tokens for sample in samples) == [len("1") + 1, len("42") + 1]
    result = group_result(found.scored, duration_s=1.0, facts=found.facts)
    assert (result.ending, result.right, result.versions) == ("ready", 0, {3: len("42") + len("1") + 2})
    assert scored_group_of(stored_group(found.scored)) == found.scored


class ScriptedPrm:
    """Likes a reply with 42."""

    digest = "d"

    def score(self, steps):
        return [float("Reply: 42" in step.decision) for step in steps]


async def test_a_prm_scores_each_reply_of_a_fork_and_adds_nothing_to_what_it_repeats(worker):
    """Replies score 0, 1 and 0, 0, the first of each repeated; z of the sampled ones, 1 and 0.05, is
    ±0.7071. The right reply gets 0.7071 + 0.5 * 0.7071, the wrong one the negative."""
    own = worker(function("solve"), Policy("1", "2", "42", "1"))
    reward = OutcomeReward(LearnerConfig(), max_turn_tokens=100)
    found = await revived(own, judge=GroupJudge(reward, PrmScorer(ScriptedPrm()).score_group))
    assert sorted(found.scored.step_scores.raw) == [(0.0, 0.0), (0.0, 1.0)]
    advantages = turn_advantages(found.scored, credit="outcome_gated", prm_weight=0.5)
    assert sorted(advantages) == [
        [0.0, pytest.approx(-1.5 * 0.7071, abs=1e-4)],
        [0.0, pytest.approx(1.5 * 0.7071, abs=1e-4)],
    ]
    assert fresh_error([found.scored]) == {}


@pytest.mark.parametrize("name", ["has_another_state", "swallows", "stops_the_second_time"])
async def test_forks_of_an_agent_that_goes_another_way_are_left_out_and_counted(worker, name, caplog):
    own = worker(function(name), Policy("1", "2", "42", "42"))
    found = await revived(own)
    assert (found.scored.ending, found.scored.roots) == ("all_wrong", None)
    assert (found.facts["inexact_forks"], found.facts["forks"], found.facts["fork_tokens"]) == (2, 0, 0)
    # Neither is anything sampled for them.
    assert len(own.engine.prompts) == 4
    said = [record.getMessage() for record in caplog.records if "does not repeat" in record.getMessage()]
    assert len(said) == (0 if name == "stops_the_second_time" else 2)


async def test_calls_side_by_side_may_come_in_another_order(worker):
    """Three sub-agents are asked in a random order, two of them repeat what they said."""
    numbers = itertools.count()
    own = worker(function("asks_side_by_side"), lambda text: f"said {next(numbers)}")
    group = await own.run_group(make_task(), "g", 1)
    [root] = group.trajectories
    anchor = Anchor(trajectory_id="g/0", num_turns=2, source="random")
    for round_ in range(1, 4):
        forks, num_tokens = await own.fork(group, anchor, round_=round_)
        [fork] = forks.trajectories
        assert num_tokens == sum(len(turn.completion.token_ids) for turn in fork.turns[2:])
        assert [turn.completion for turn in fork.turns[:2]] == [turn.completion for turn in root.turns[:2]]
        assert [turn.trainable for turn in fork.turns] == [False, False, True, True]
        assert fork.branches == ((0,), (1,), (2,), (3,))
        samples = build_samples(forks, [[0.0, 0.0, 1.0, 1.0]], temperature=1.0)
        assert [sample.num_loss_tokens > 0 for sample in samples] == [False, False, True, True]
        assert build_batch(samples, microbatch_tokens=1000).num_trajectories == 2
        assert trajectory_of(trajectory_record(fork, reward=0.0, phase="rl", step=1)) == fork


async def test_any_beginning_but_the_whole_can_be_gone_on_from(worker):
    own = worker(function("solve"), Policy(CALL, "1", CALL, "2", *["42", "1"] * 4))
    found = await revived(own, RandomRestartsConfig())
    assert found.scored.ending == "ready"
    assert 1 <= found.scored.anchor.num_turns <= 2


async def test_an_end_that_does_not_repeat_the_attempt_is_no_continuation_of_it(worker):
    own = worker(function("has_another_state"), Policy("1"))
    [root] = (await own.run_group(make_task(), "g", 1)).trajectories
    assert await own.continue_from(root, 1, 2) == []


async def test_new_ends_of_an_attempt_are_sampled_after_its_first_turns(worker):
    own = worker(function("solve"), Policy("1", "7", "8"))
    [root] = (await own.run_group(make_task(), "g", 1)).trajectories
    ends = await own.continue_from(root, 1, 2)
    assert {one.answer for one in ends} == {"7", "8"}
    assert [one.id for one in ends] == ["g/0+1/0", "g/0+1/1"]
