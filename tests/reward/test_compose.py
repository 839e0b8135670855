import json
import math
from pathlib import Path
from typing import get_args

import pytest

from configs.reward import Credit
from envs.types import Task, ToolCall, ToolResult
from learner.credit import VALID_FLOOR, assign_credit, map_score, step_reward
from learner.packing import build_batch, group_samples
from rollout.types import Group, Reward, StepScores, Trajectory
from tests.reward.test_step_text import completion, sampled

GOLDEN = Path(__file__).parents[1] / "golden" / "values.json"
TASK = Task(id="t", dataset="lookup", question="6*7?", answer="42")
CREDITS = get_args(Credit)
Z = math.sqrt(0.5)
"""Advantage of one right trajectory beside a wrong one: 0.5 over the sample std of 0 and 1."""


def make_turn(prompt, *token_ids, valid=True):
    """Return a planner turn; token 99 follows it in the dialogue."""
    outcome = {"tool_call": ToolCall(name="think", arguments="x"), "tool_result": ToolResult(text="ok")}
    return sampled(prompt, completion("x", token_ids), **(outcome if valid else {"format_error": "not JSON"}))


def make_trajectory(index, *completions, malformed=()):
    turns, prompt = [], (1, 2)
    for number, token_ids in enumerate(completions):
        turns.append(make_turn(prompt, *token_ids, valid=number not in malformed))
        prompt = (*prompt, *token_ids, 99)
    return Trajectory(id=f"g/{index}", group_id="g", task=TASK, turns=tuple(turns), answer="42", stop_reason="answered")


def make_scored(*trajectories, totals=(1.0, 0.0), raw=None):
    group = Group(id="g", trajectories=trajectories)
    for trajectory, total in zip(trajectories, totals, strict=True):
        trajectory.reward = Reward(outcome=total, total=total)
    if raw is not None:
        StepScores(raw=raw, prm_digest="d").write_to(group)
    return group


def raw_for(*rewards):
    """Return the raw score that is mapped to each reward."""
    return tuple((reward - 0.05) / 0.95 for reward in rewards)


def credited(scored, credit):
    assign_credit(scored, scheme=credit)
    return [[turn.advantage for turn in one.turns] for one in scored.trajectories]


def samples_for(scored, credit):
    assign_credit(scored, scheme=credit)
    return group_samples(scored, temperature=1.0)


def test_centered_credit_ignores_the_scores_and_is_recorded():
    # 1, 0, 0 and 0: mean 0.25.
    attempts = [make_trajectory(index, (13 + index,)) for index in range(4)]
    scored = make_scored(*attempts, totals=(1.0, 0.0, 0.0, 0.0), raw=((0.2,), (0.5,), (0.5,), (0.9,)))
    assign_credit(scored, scheme="outcome_centered")
    turns = [attempt.turns[0] for attempt in attempts]
    assert [turn.advantage for turn in turns] == [0.75, -0.25, -0.25, -0.25]
    assert {turn.same_steps for turn in turns} == {(0.75, -0.25, -0.25, -0.25)}
    credit = attempts[0].credit
    assert (credit.scheme, credit.totals.mean) == ("outcome_centered", 0.25)


def test_process_credit_is_centered_and_not_scaled_up():
    attempts = [make_trajectory(index, (13 + index,), (20,)) for index in range(2)]
    scored = make_scored(*attempts, totals=(0.51, 0.49), raw=((0.6, 0.5), (0.6, 0.5)))
    assign_credit(scored, scheme="process")
    turns = [turn for attempt in attempts for turn in attempt.turns]
    assert [turn.advantage for turn in turns] == pytest.approx([0.01, 0.01, -0.01, -0.01])
    assert attempts[0].credit.scheme == "process"


@pytest.mark.parametrize("credit", CREDITS)
def test_unscorable_trajectory_trains_nothing_and_affects_no_sibling(credit):
    pair = make_trajectory(0, (10, 11), (12,)), make_trajectory(1, (13,))
    raw = (raw_for(0.2, 0.8), raw_for(0.5))
    broken = make_scored(*pair, make_trajectory(2, (14,), (15,)), totals=(1.0, 0.0, None), raw=(*raw, (0.1, 0.9)))
    found = credited(broken, credit)
    assert found[2] == [0.0, 0.0]
    assert found[:2] == credited(make_scored(*pair, raw=raw), credit)


@pytest.mark.parametrize("credit", CREDITS)
def test_each_token_has_the_advantage_of_its_turn(credit):
    scored = make_scored(
        make_trajectory(0, (10, 11), (12,)),
        make_trajectory(1, (13,), (14, 15, 16)),
        raw=((0.2, 0.8), (0.6, 0.3)),
    )
    advantages = credited(scored, credit)
    samples = samples_for(scored, credit)
    for sample, turns, spans in zip(samples, advantages, ([(2, 4), (5, 6)], [(2, 3), (4, 7)]), strict=True):
        expected, trained = [0.0] * len(sample.token_ids), [False] * len(sample.token_ids)
        for advantage, (start, end) in zip(turns, spans, strict=True):
            expected[start:end] = [advantage] * (end - start)
            trained[start:end] = [True] * (end - start)
        assert sample.advantages.tolist() == pytest.approx(expected)
        assert sample.loss_mask.tolist() == trained


@pytest.mark.parametrize("credit", CREDITS)
def test_trajectory_of_average_reward_has_no_advantage_and_counts_in_the_denominators(credit):
    trajectories = [make_trajectory(index, (10 + index, 20)) for index in range(4)]
    scored = make_scored(*trajectories, totals=(1.0, 0.5, 0.0, None))
    batch = build_batch(samples_for(scored, credit), microbatch_tokens=100)
    (rows,) = batch.microbatches
    assert {row.trajectory_id: bool(row.advantages.any()) for row in rows} == {"g/0": True, "g/1": False, "g/2": True}
    assert (batch.num_trajectories, batch.num_loss_tokens) == (3, 6)


def test_malformed_turn_gets_zero_and_a_valid_one_at_least_the_floor():
    trajectory = make_trajectory(0, (10,), (11,), (12,), malformed=[0])
    make_scored(trajectory, totals=(1.0,), raw=((0.9, 0.0, None),))
    assert [step_reward(turn) for turn in trajectory.turns] == [0.0, VALID_FLOOR, None]


def test_reward_map_matches_golden_values():
    golden = json.loads(GOLDEN.read_text())["prm_reward_map"]
    assert golden["floor"] == VALID_FLOOR
    for case in golden["cases"]:
        raw = case["raw"] if case["raw_note"] is None else float(case["raw_note"])
        if case["reward"] == "error":
            with pytest.raises(ValueError, match="number"):
                map_score(raw, valid=case["valid"])
        else:
            assert map_score(raw, valid=case["valid"]) == pytest.approx(case["reward"]), case
