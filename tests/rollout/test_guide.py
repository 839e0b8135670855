import pytest
from endpoint_play import new_attempt, new_client
from scripted import ScriptedEngine, ScriptedTool, decision, make_agent, make_task, run, text_of

from rollout.endpoint.server import Endpoint
from rollout.guide import WINDOW, Earned, Guide
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


async def test_a_low_score_is_enough_if_it_does_not_fall_below_the_one_before():
    guide, _ = make_guide({GOOD: 0.2, BAD: 0.1, ANSWER: 0.2, GIVES_UP: 0.19})
    trajectory = await run(guided([BAD, GOOD, BAD, BAD, GIVES_UP, ANSWER], guide))
    assert [(turn.text, turn.num_candidates) for turn in trajectory.turns] == [(GOOD, 4), (ANSWER, 2)]


@pytest.mark.parametrize(("place", "sampled"), [(0, 1), (1, 2), (2, 4), (3, 4), (4, 8), (7, 8), (8, 12), (11, 12)])
async def test_candidates_are_sampled_in_rounds_that_double(place, sampled):
    guide, _ = make_guide({GOOD: 0.9, ANSWER: 0.9}, candidates=12)
    texts = [BAD] * place + [GOOD] + [BAD] * (sampled - place - 1) + [ANSWER]
    trajectory = await run(guided(texts, guide))
    assert trajectory.turns[0].num_candidates == sampled
    assert guide.num_tokens == sum(len(text) + 1 for text in texts)


async def test_each_text_is_scored_once_in_its_state_and_again_in_another():
    guide, asked = make_guide({BAD: 0.2, GIVES_UP: 0.1, ANSWER: 0.9}, candidates=4)
    trajectory = await run(guided([BAD, BAD, GIVES_UP, BAD, BAD, ANSWER], guide))
    assert [(turn.text, turn.score, turn.num_candidates) for turn in trajectory.turns] == [
        (BAD, 0.2, 4),
        (BAD, 0.2, 1),
        (ANSWER, 0.9, 1),
    ]
    assert asked == [[[BAD]], [[GIVES_UP]], [[BAD, BAD]], [[BAD, BAD, ANSWER]]]


async def test_the_best_of_low_scores_is_taken_as_long_as_they_do_not_fall_to_half():
    guide, _ = make_guide({GOOD: 0.2, BAD: 0.1, ANSWER: 0.11, GIVES_UP: 0.05}, candidates=2)
    trajectory = await run(guided([BAD, GOOD, GIVES_UP, ANSWER], guide))
    assert [(turn.text, turn.num_candidates) for turn in trajectory.turns] == [(GOOD, 2), (ANSWER, 2)]


@pytest.mark.parametrize(
    ("scores", "sampled", "candidates"),
    [
        ((0.9, 0.45), [GOOD, BAD, BAD, GIVES_UP], [1, 2, 1]),
        ((0.2, 0.1), [GOOD, GOOD, BAD, BAD, GIVES_UP], [2, 2, 1]),
        ((0.0, 0.0), [GOOD, GOOD, BAD, GIVES_UP], [2, 1, 1]),
    ],
)
async def test_after_a_fall_to_half_the_rest_of_the_attempt_is_sampled_plainly(scores, sampled, candidates):
    guide, _ = make_guide(dict(zip((GOOD, BAD), scores, strict=True)), candidates=2)
    trajectory = await run(guided(sampled, guide))
    assert [turn.text for turn in trajectory.turns] == [GOOD, BAD, GIVES_UP]
    assert [turn.num_candidates for turn in trajectory.turns] == candidates


async def test_malformed_or_unscored_decision_is_never_good():
    guide, asked = make_guide({"rubbish": 1.0, ANSWER: 0.6}, candidates=3)
    trajectory = await run(guided(["rubbish", GOOD, ANSWER], guide))
    assert asked == [[[GOOD]], [[ANSWER]]]
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
    assert [(turn.text, turn.score, turn.num_candidates) for turn in turns] == [("yes", 0.8, 2), ("good", 0.9, 2)]
    assert asked[-1] == [["yes", "good"]]


def share_of_guided_tokens(*, kept_every, rescued_every, groups=400, price=2.5):
    """Return guided tokens per plain token; signal comes in one of so many groups, or tries."""
    earned, tries, spent = Earned(), 0, 0.0
    for number in range(1, groups + 1):
        kept = kept_every and number % kept_every == 0
        cost = earned.note("chain", {"sampled_tokens": 600.0, "kept": float(kept)})
        if not kept and earned.wants("chain"):
            tries += 1
            cost.guided_tokens, cost.rescued = price * 600, float(bool(rescued_every and tries % rescued_every == 0))
            spent += cost.guided_tokens
    return spent / (600 * groups)


@pytest.mark.parametrize(
    ("kept_every", "rescued_every", "least", "most"),
    [
        (0, 0, 0.9, 1.05),  # neither finds anything
        (0, 1, 2.5, 2.5),
        (0, 8, 2.4, 2.5),
        (16, 4, 2.3, 2.5),
        (16, 0, 0.2, 0.3),
        (2, 0, 0.0, 0.05),
        (2, 8, 0.0, 0.05),  # a try costs 20 groups' tokens for one group, and plain sampling two
        (4, 1, 1.8, 1.9),
    ],
)
def test_guided_attempts_are_made_as_long_as_they_bring_signal_for_fewer_tokens(kept_every, rescued_every, least, most):
    assert least <= share_of_guided_tokens(kept_every=kept_every, rescued_every=rescued_every) <= most


def test_each_data_set_earns_its_own_guided_attempts():
    earned = Earned()
    for _ in range(WINDOW):
        earned.note("chain", {"sampled_tokens": 600.0, "kept": 1.0})
    earned.note("chain", {"sampled_tokens": 600.0, "kept": 0.0}).guided_tokens = 1500.0
    assert not earned.wants("chain")
    assert earned.wants("another")
