"""An agent of one's own over the real engine: what is recorded is what the engine sampled, call by call."""

import pytest

from configs.loading import load_run_config
from envs.types import Task
from rollout.guide import Guide
from rollout.types import StepScores

pytestmark = pytest.mark.slow

AGENT = """
ADD = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
    "additionalProperties": False}}}

async def solve(task, client):
    async def ask(messages, **more):
        reply = await client.chat.completions.create(model="policy", messages=messages, **more)
        return reply.choices[0].message

    asked = [{"role": "user", "content": task.question}]
    called = await ask(asked, tools=[ADD], tool_choice={"type": "function", "function": {"name": "add"}})
    told = [{"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "4"}]
    await ask([*asked, called, *told], tools=[ADD])
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": ADD["function"]["parameters"]}}
    await ask([*asked, {"role": "assistant", "content": "Hm."}, *asked], tools=[ADD], response_format=form)
    answer = await ask([*asked, called, *told, {"role": "user", "content": "e?"}], tools=[ADD], stop=["e", "a"])
    return answer.content
"""


@pytest.fixture(scope="module")
def worker(model_path, tmp_path_factory):
    from rollout.worker import Worker

    folder = tmp_path_factory.mktemp("agent")
    (folder / "agent_of_the_engine_test.py").write_text(AGENT)
    own = ["agent.function=agent_of_the_engine_test:solve", "cold_start.num_demonstrations=0"]
    config = load_run_config(
        None, [*own, "reward.credit=outcome", "rollout.max_turn_tokens=48", "rollout.episode_timeout_s=3600"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        worker = Worker(config, model_path, index=0)
        yield worker
        worker.close()


async def test_guided_attempts_are_sampled_by_the_engine(worker):
    async def likes_nothing(group):
        return StepScores(raw=tuple((0.0,) * len(one.planner_turns) for one in group.trajectories), prm_digest="d")

    task = Task(id="t", dataset="own", question="What is 2+2?", answer="4")
    guides = [Guide(task=task, score_steps=likes_nothing, candidates=3) for _ in range(2)]
    group = await worker.run_guided(task, "g", guides, "")
    assert [one.id for one in group.trajectories] == ["g/guided/0", "g/guided/1"]
    for trajectory, guide in zip(group.trajectories, guides, strict=True):
        assert (trajectory.failure, trajectory.stop_reason) == (None, "answered")
        assert [turn.num_candidates for turn in trajectory.turns] == [3, 1, 1, 1]
        assert guide.num_tokens > trajectory.num_sampled_tokens


async def test_search_repeats_the_right_steps_and_returns_the_candidates_of_the_next(worker):
    task = Task(id="t", dataset="own", question="What is 2+2?", answer="4")
    (root,) = (await worker.run_group(task, "g", 1, "")).trajectories

    async def knows_two(group):
        raw = ((1.0, 1.0, None, None)[: len(one.planner_turns)] for one in group.trajectories)
        return StepScores(raw=tuple(raw), prm_digest="")

    (attempt, *candidates), num_tokens = await worker.search(root, 2, "s", knows_two, 8)
    assert (attempt.id, attempt.failure) == ("s", None)
    assert [turn.completion for turn in attempt.turns[:2]] == [turn.completion for turn in root.turns[:2]]
    assert [turn.num_candidates for turn in attempt.turns] == [1, 1, 8, 1]
    texts = [one.turns[-1].text for one in candidates]
    assert len(set(texts)) == len(texts) > 1
    for number, one in enumerate(candidates):
        assert (one.id, one.group_id, one.answer) == (f"s/{number}", "s", None)
        assert one.turns[:2] == attempt.turns[:2]
    assert num_tokens > sum(one.turns[-1].num_tokens for one in candidates)


async def test_group_of_an_own_agent_and_its_replays_are_what_the_engine_sampled(worker, learner):
    from learner.packing import samples_of

    task = Task(id="t", dataset="own", question="What is 2+2?", answer="4")
    group = await worker.run_group(task, "g", 2, "")
    for trajectory in group.trajectories:
        assert (trajectory.failure, trajectory.stop_reason) == (None, "answered")
        called, told, form, last = trajectory.turns
        assert trajectory.branches == ((0, 1), (2,), (3,))
        assert called.tool_call.name == "add"
        assert form.text.startswith(("{", "<tool_call>"))
        own = called.prompt_token_ids + called.token_ids
        assert told.prompt_token_ids[: len(own)] == own == last.prompt_token_ids[: len(own)]
        assert trajectory.answer == last.text
        assert not {"e", "a"} & set(trajectory.answer)
        samples = samples_of(trajectory, [1.0] * 4, temperature=worker._config.rollout.temperature)
        trained = sum(one.num_loss_tokens for one in samples)
        assert trained == sum(len(turn.token_ids) for turn in trajectory.turns)
        # Raises where a token does not follow the grammar that it was sampled under.
        assert learner.policy.logprobs(samples).shape[0] == 3
    root = group.trajectories[1]
    for end in await worker.continue_from(root, 3, 2):
        assert (end.failure, end.branches) == (None, root.branches)
        assert [turn.completion for turn in end.turns[:3]] == [turn.completion for turn in root.turns[:3]]
        assert [turn.trainable for turn in end.turns] == [False, False, False, True]
