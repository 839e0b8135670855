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


@pytest.mark.parametrize(("place", "sampled"), [(0, 1), (1, 2), (2, 4), (3, 4), (4, 8), (7, 8), (8, 12), (11, 12)])
async def test_candidates_are_sampled_in_rounds_that_double(place, sampled):
    guide, _ = make_guide({GOOD: 0.9, ANSWER: 0.9}, candidates=12)
    texts = [BAD] * place + [GOOD] + [BAD] * (sampled - place - 1) + [ANSWER]
    trajectory = await run(guided(texts, guide))
    assert trajectory.turns[0].num_candidates == sampled
    assert guide.num_tokens == sum(len(text) + 1 for text in texts)


async def test_each_text_is_scored_once_in_its_state_and_again_in_another():
    guide, asked = make_guide({BAD: 0.2, GOOD: 0.6, ANSWER: 0.9}, candidates=4)
    trajectory = await run(guided([BAD, BAD, GOOD, BAD, BAD, BAD, ANSWER, BAD], guide))
    assert [(turn.text, turn.score, turn.num_candidates) for turn in trajectory.turns] == [
        (GOOD, 0.6, 4),
        (ANSWER, 0.9, 4),
    ]
    assert asked == [[[BAD]], [[GOOD]], [[GOOD, BAD]], [[GOOD, ANSWER]]]


@pytest.mark.parametrize("score", [0.49, 0.0])
async def test_without_a_good_candidate_the_rest_of_the_attempt_is_sampled_plainly(score):
    guide, _ = make_guide({GOOD: 0.5, BAD: score}, candidates=2)
    trajectory = await run(guided([GOOD, BAD, BAD, GIVES_UP], guide))
    assert [turn.text for turn in trajectory.turns] == [GOOD, BAD, GIVES_UP]
    assert [turn.num_candidates for turn in trajectory.turns] == [1, 2, 1]


async def test_malformed_or_unscored_decision_is_never_good():
    guide, asked = make_guide({"rubbish": 1.0, ANSWER: 0.6}, candidates=3)
    trajectory = await run(guided(["rubbish", GOOD, ANSWER], guide))
    assert asked == [[[GOOD]], [[ANSWER]]]
    assert [turn.text for turn in trajectory.turns] == [ANSWER]


async def test_scorer_that_fails_leaves_the_attempt_unscored():
    async def fails(group):
        raise ConnectionError

    guide = Guide(task=make_task(), score_steps=fails, candidates=2)
    trajectory = await run(guided([GOOD], guide))
    assert trajectory.stop_reason == "infrastructure"
    assert isinstance(guide.failure, ConnectionError)


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


def share_of_guided_tokens(*, kept_every, rescued_every, price, groups=800):
    """Return guided tokens per plain token; signal comes in one of so many groups, or tries."""
    earned, tries, spent = Earned(), 0, 0.0
    for number in range(1, groups + 1):
        kept = kept_every and number % kept_every == 0
        cost = earned.note("chain", {"sampled_tokens": 600.0, "kept": float(kept)})
        if not kept and earned.begin("chain", cost):
            tries += 1
            cost.guided_tokens, cost.rescued = price * 600, float(bool(rescued_every and tries % rescued_every == 0))
            spent += cost.guided_tokens
    return spent / (600 * groups)


@pytest.mark.parametrize("price", [2.5, 25])
@pytest.mark.parametrize(
    ("kept_every", "rescued_every", "least", "most"),
    [
        (0, 0, 0.4, 0.5),  # neither finds anything
        (0, 1, 0.95, 1.0),
        (16, 0, 0.0, 0.06),
        (2, 0, 0.0, 0.05),
        (2, 8, 0.0, 0.05),
    ],
)
def test_guided_attempts_are_made_as_long_as_they_bring_signal_for_fewer_tokens(
    kept_every, rescued_every, least, most, price
):
    share = share_of_guided_tokens(kept_every=kept_every, rescued_every=rescued_every, price=price)
    assert least <= (share / price if rescued_every == 1 else share) <= most


@pytest.mark.parametrize(("kept_every", "rescued_every", "least"), [(0, 8, 2.2), (16, 4, 1.6), (4, 1, 1.8)])
def test_guided_attempts_go_on_where_they_bring_signal_for_fewer_tokens(kept_every, rescued_every, least):
    share = share_of_guided_tokens(kept_every=kept_every, rescued_every=rescued_every, price=2.5)
    assert least <= share <= 2.5


def test_no_others_are_made_until_the_cost_of_the_first_is_known():
    earned = Earned()
    first = earned.note("chain", {"sampled_tokens": 600.0, "kept": 0.0})
    assert earned.begin("chain", first)
    for _ in range(WINDOW - 1):
        assert not earned.begin("chain", earned.note("chain", {"sampled_tokens": 600.0, "kept": 0.0}))
    first.guided_tokens = 600.0
    assert earned.begin("chain", earned.note("chain", {"sampled_tokens": 600.0, "kept": 0.0}))


def test_each_data_set_earns_its_own_guided_attempts():
    earned = Earned()
    for _ in range(WINDOW):
        earned.note("chain", {"sampled_tokens": 600.0, "kept": 1.0})
    earned.note("chain", {"sampled_tokens": 600.0, "kept": 0.0}).guided_tokens = 1500.0
    for dataset, earns in (("chain", False), ("another", True)):
        assert earned.begin(dataset, earned.note(dataset, {"sampled_tokens": 600.0, "kept": 0.0})) is earns
