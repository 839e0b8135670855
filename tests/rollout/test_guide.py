import pytest
from endpoint_play import new_attempt, new_client
from scripted import ScriptedEngine, ScriptedTool, decision, make_agent, make_task, run, text_of

from rollout.endpoint.server import Endpoint
from rollout.guide import EVERY, FIRST, WINDOW, Earned, Guide
from rollout.types import StepScores
from tests.changed import replace

GOOD, BAD = decision("code", "6*7"), decision("code", "6+7")
ANSWER, GIVES_UP = decision("answer", "42"), decision("answer", "unknown")


def make_guide(scores, candidates=4):
    """Return a guide whose scorer gives each text its score, and what the scorer was asked about."""
    asked = []

    async def score_steps(group):
        asked.append([[turn.text for turn in one.planner_turns] for one in group.trajectories])
        raw = (tuple(scores.get(turn.text) for turn in one.planner_turns) for one in group.trajectories)
        return StepScores(raw=tuple(raw), prm_digest="d")

    return Guide(task=make_task(), score_steps=score_steps, candidates=candidates), asked


def guided(texts, guide):
    return replace(make_agent(texts, tools=[ScriptedTool("code", {"6*7": "42", "6+7": "13"})]), guide=guide)


async def test_first_sample_with_a_good_score_is_taken_and_nothing_else_is_sampled():
    guide, asked = make_guide({GOOD: 0.5, ANSWER: 1.0})
    trajectory = await run(guided([GOOD, ANSWER], guide))
    assert [turn.text for turn in trajectory.turns] == [GOOD, ANSWER]
    assert [(turn.score, turn.num_candidates) for turn in trajectory.turns] == [(0.5, 1), (1.0, 1)]
    assert asked == [[[GOOD]], [[GOOD, ANSWER]]]
    assert guide.num_tokens == trajectory.num_sampled_tokens


async def test_best_of_all_candidates_is_taken_and_the_dialogue_continues_from_it_alone():
    guide, _ = make_guide({BAD: 0.1, GIVES_UP: 0.0, GOOD: 0.9, ANSWER: 0.7})
    agent = guided([GIVES_UP, BAD, GOOD, BAD, ANSWER], guide)
    trajectory = await run(agent)
    assert trajectory.answer == "42"
    first, last = trajectory.turns
    assert (first.text, first.score, first.num_candidates) == (GOOD, 0.9, 4)
    assert last.prompt_token_ids[: len(first.dialogue) // 4] == first.prompt_token_ids + first.token_ids
    assert {text_of(one.prompt_token_ids) for one in agent.engine.requests[:4]} == {text_of(first.prompt_token_ids)}
    assert guide.num_tokens == sum(len(text) + 1 for text in (GIVES_UP, BAD, GOOD, BAD, ANSWER))


async def test_without_a_good_sample_the_best_is_taken_and_the_rest_of_the_attempt_is_sampled_plainly():
    guide, asked = make_guide({BAD: 0.2, GIVES_UP: 0.1})
    trajectory = await run(guided([GIVES_UP, BAD, GIVES_UP, GIVES_UP, GIVES_UP], guide))
    assert [turn.text for turn in trajectory.turns] == [BAD, GIVES_UP]
    assert [turn.num_candidates for turn in trajectory.turns] == [4, 1]
    assert len(asked) == 2


async def test_malformed_or_unscored_decision_is_never_good():
    guide, _ = make_guide({"rubbish": 1.0, ANSWER: 0.6}, candidates=3)
    trajectory = await run(guided(["rubbish", GOOD, ANSWER], guide))
    assert [turn.text for turn in trajectory.turns] == [ANSWER]


async def test_scorer_that_fails_leaves_the_attempt_unscored():
    async def fails(group):
        raise ConnectionError

    trajectory = await run(guided([GOOD], Guide(task=make_task(), score_steps=fails, candidates=2)))
    assert trajectory.stop_reason == "infrastructure"


async def test_replies_to_a_custom_agent_are_chosen_whatever_seed_it_asks_for():
    guide, asked = make_guide({"no": 0.1, "yes": 0.8, "good": 0.9}, candidates=3)
    engine, endpoint = ScriptedEngine(["no", "yes", "no", "good"]), Endpoint()
    attempt = new_attempt(engine, guide=guide)
    endpoint.admit(attempt)
    asked_by = [{"role": "user", "content": "?"}]
    async with new_client(endpoint, api_key=attempt.key) as client:
        first = await client.chat.completions.create(model="policy", messages=asked_by, seed=7)
        asked_by += [first.choices[0].message, {"role": "user", "content": "and?"}]
        second = await client.chat.completions.create(model="policy", messages=asked_by, seed=7)
    endpoint.close()
    assert [one.choices[0].message.content for one in (first, second)] == ["yes", "good"]
    assert [one.seed for one in engine.requests] == [None] * 4
    turns = await attempt.end()
    assert [(turn.text, turn.score, turn.num_candidates) for turn in turns] == [("yes", 0.8, 3), ("good", 0.9, 1)]
    assert asked[-1] == [["yes", "good"]]


@pytest.mark.parametrize(("rescued", "num_tried"), [(True, 40), (False, FIRST + (40 - FIRST) // EVERY)])
def test_a_data_set_keeps_its_guided_attempts_as_long_as_they_rescue_groups(rescued, num_tried):
    earned, tried = Earned(), 0
    for _ in range(40):
        if earned.wants("chain"):
            tried += 1
            earned.note("chain", rescued=rescued)
    assert tried == num_tried
    assert earned.wants("another")


def test_guided_attempts_come_back_when_they_rescue_again():
    earned = Earned()
    for rescued in (False,) * FIRST + (True,) * 2 * WINDOW:
        while not earned.wants("chain"):
            pass
        earned.note("chain", rescued=rescued)
    assert all(earned.wants("chain") for _ in range(EVERY))


def test_groups_in_flight_do_not_all_count_as_the_first_tries():
    earned = Earned()
    assert sum(earned.wants("chain") for _ in range(EVERY)) == FIRST
