"""What becomes of a group whose attempts all fail: forks, judged like any group, trained on what they sampled."""

import asyncio
from dataclasses import replace

import pytest

from configs.learner import LearnerConfig
from configs.rollout import FirstCallRestartsConfig, NoRestartsConfig
from envs.types import Task, ToolCall, ToolResult
from learner.samples import build_samples
from reward.credit import credit_parts, turn_advantages
from reward.judging import GroupJudge, OutcomeReward, group_result
from reward.restarts import Restarter, all_sampled_tokens, restart_metrics
from reward.statistics import statistics_of
from reward.stored import scored_group_of, stored_group
from reward.types import StepScores
from rollout.restarts import Anchor
from rollout.types import Completion, Trajectory, TrajectoryGroup, Turn

TASK = Task(id="t", dataset="arith", question="6*7?", answer="42")


def turn(action, prompt, token, *, trainable=True, version=1, logprob=-1.0):
    completion = Completion(
        token_ids=(token,), logprobs=(logprob,), text="x", finish_reason="stop", policy_version=version
    )
    return Turn(
        role="planner",
        prompt_token_ids=prompt,
        completion=completion,
        trainable=trainable,
        tool_call=ToolCall(name=action, arguments="x"),
        tool_result=ToolResult(text="ok"),
    )


def trajectory(index, answer, *, depth=2, trainable=True, version=1, logprob=-1.0):
    """`depth` searches, of which those of a fork were replayed, then the answer."""
    turns = [
        turn("search", tuple(range(1, 2 * at + 2)), 2 * at + 2, trainable=trainable, logprob=logprob)
        for at in range(depth)
    ]
    turns.append(turn("answer", tuple(range(1, 2 * depth + 2)), 90 + index, version=version))
    return Trajectory(
        id=f"g/{index}", group_id="g", task=TASK, turns=tuple(turns), answer=answer, stop_reason="answered"
    )


def roots(*answers):
    return TrajectoryGroup(
        id="g", task=TASK, trajectories=tuple(trajectory(at, answer) for at, answer in enumerate(answers))
    )


class ScriptedForks:
    """Ends with the given answers, round by round. Each fork samples one token, and so do those that are left out."""

    def __init__(self, *rounds):
        self.rounds = list(rounds)
        self.anchors = []

    async def fork(self, group, anchor, *, round_):
        self.anchors.append(anchor.num_turns)
        size = len(group.trajectories)
        forks = [
            trajectory(round_ * size + at, answer, depth=anchor.num_turns, trainable=False, version=5)
            for at, answer in enumerate(self.rounds[round_ - 1])
        ]
        return TrajectoryGroup(id="g", task=TASK, trajectories=tuple(forks)), size


JUDGE = GroupJudge(OutcomeReward(LearnerConfig(), max_turn_tokens=100))


async def revived(group, forks, config=None):
    restarter = Restarter(config or FirstCallRestartsConfig(), forks, JUDGE, seed=0)
    return await restarter.revive(await JUDGE.judge(group))


async def test_forks_that_end_differently_are_trained_on_in_the_place_of_the_group():
    found = await revived(roots("1", "2"), ScriptedForks(["42", "1"]))
    assert found.scored.ending == "ready"
    assert [one.id for one in found.scored.group.trajectories] == ["g/2", "g/3"]
    assert [one.id for one in found.scored.roots.group.trajectories] == ["g/0", "g/1"]
    assert (found.scored.anchor.num_turns, found.scored.anchor.source) == (1, "first_call")
    assert found.facts == {
        "dead_groups": 1,
        "anchored_groups": 1,
        "revived_groups": 1,
        "forks": 2,
        "fork_tokens": 2,
        "inexact_forks": 0,
        "generate_s": 0,
        "tool_s": 0,
    }


@pytest.mark.parametrize("answers", [("42", "1"), ("42", "42"), ("1", None)])
async def test_only_groups_that_are_all_wrong_get_forks(answers):
    group = roots(*answers)
    if None in answers:
        broken = replace(group.trajectories[1], stop_reason="infrastructure")
        group = replace(group, trajectories=(group.trajectories[0], broken))
    forks = ScriptedForks()
    found = await revived(group, forks)
    assert (forks.anchors, found.facts, found.scored.group) == ([], {}, group)


async def test_recipe_without_restarts_asks_for_no_fork():
    forks = ScriptedForks()
    assert (await revived(roots("1", "2"), forks, NoRestartsConfig())).facts == {}
    assert forks.anchors == []


@pytest.mark.parametrize("answers", [("1", "2"), ("42", "42")])
async def test_forks_that_all_end_alike_leave_the_group_as_it_was(answers):
    found = await revived(roots("1", "2"), ScriptedForks(answers))
    assert (found.scored.ending, found.scored.roots, found.facts["revived_groups"]) == ("all_wrong", None, 0)


async def test_each_further_round_goes_on_from_one_turn_earlier_and_never_from_the_task_itself(monkeypatch):
    anchor = Anchor(trajectory_id="g/0", num_turns=2, source="first_call")
    monkeypatch.setattr("reward.restarts.choose_anchor", lambda *_, **__: anchor)
    forks = ScriptedForks(["1", "2"], ["1", "2"])
    found = await revived(roots("1", "2"), forks, FirstCallRestartsConfig(rounds=3))
    assert forks.anchors == [2, 1]
    assert (found.facts["revived_groups"], found.facts["forks"]) == (0, 4)


async def test_forks_whose_replay_was_not_exact_are_counted():
    found = await revived(roots("1", "2", "3"), ScriptedForks(["42", "1"]))
    assert (found.facts["inexact_forks"], found.facts["fork_tokens"]) == (1, 3)
    assert found.scored.ending == "ready"


async def test_replayed_turns_have_no_advantage_and_no_token_in_the_loss():
    """z of (1, 0) with the sample standard deviation is 0.7071."""
    found = await revived(roots("1", "2"), ScriptedForks(["42", "1"]))
    advantages = turn_advantages(found.scored, credit="outcome", prm_weight=0.0)
    assert advantages == [[0.0, pytest.approx(0.70710578)], [0.0, pytest.approx(-0.70710578)]]
    samples = build_samples(found.scored.group, advantages, temperature=1.0)
    assert [sample.loss_mask.tolist() for sample in samples] == [[False, False, False, True]] * 2


async def test_what_explains_a_replayed_turn_is_zero_in_all_its_parts():
    found = await revived(roots("1", "2"), ScriptedForks(["42", "1"]))
    parts = credit_parts(found.scored, credit="outcome", prm_weight=0.0)
    assert parts.outcomes == [[0.0, pytest.approx(0.70710578)], [0.0, pytest.approx(-0.70710578)]]
    assert parts.processes == [[0.0, 0.0], [0.0, 0.0]]


async def test_log_prob_of_a_replayed_token_changes_nothing():
    found = await revived(roots("1", "2"), ScriptedForks(["42", "1"]))
    advantages = turn_advantages(found.scored, credit="outcome", prm_weight=0.0)
    other = replace(
        found.scored.group,
        trajectories=tuple(
            trajectory(at + 2, answer, depth=1, trainable=False, version=5, logprob=-9.0)
            for at, answer in enumerate(("42", "1"))
        ),
    )
    for one, changed in zip(
        build_samples(found.scored.group, advantages, temperature=1.0),
        build_samples(other, advantages, temperature=1.0),
        strict=True,
    ):
        assert (one.rollout_logprobs == changed.rollout_logprobs).all()


async def test_statistics_are_of_the_roots_and_versions_of_what_the_forks_sampled():
    found = await revived(roots("1", "2"), ScriptedForks(["42", "1"]))
    result = group_result(found.scored, duration_s=1.0, facts=found.facts)
    assert (result.ending, result.facts["right"], result.facts["trajectories"]) == ("ready", 0, 2)
    assert result.versions == {5: 2}


async def test_step_scores_are_counted_of_what_forks_sampled():
    """Regression: a PRM that ranked forks wrongly, or scored none, was nowhere to be seen. What forks repeat has one
    score in all of them."""
    scores = {"g/2": (0.9, 0.2), "g/3": (0.9, 0.8), "g/4": (0.9, None)}

    async def score(group):
        return StepScores(raw=tuple(scores[one.id] for one in group.trajectories), prm_digest="d")

    judge = GroupJudge(OutcomeReward(LearnerConfig(), max_turn_tokens=100), score)
    forks = ScriptedForks(["42", "1", "1"])
    restarter = Restarter(FirstCallRestartsConfig(), forks, judge, seed=0)
    found = await restarter.revive(await judge.judge(roots("1", "2")))
    metrics = statistics_of(group_result(found.scored, duration_s=1.0, facts=found.facts).facts).metrics()
    assert (metrics["rollout/solve_rate"], metrics["rollout/trajectories"]) == (0, 2)
    assert metrics["prm/score"] == pytest.approx(0.5)
    assert metrics["prm/unscored_share"] == pytest.approx(1 / 3)
    assert metrics["prm/sibling_auroc"] == 0


def timed(group, *, generate_s, tool_s):
    """Each turn of the group took so long."""
    trajectories = tuple(
        replace(one, turns=tuple(replace(turn, generate_s=generate_s, tool_s=tool_s) for turn in one.turns))
        for one in group.trajectories
    )
    return replace(group, trajectories=trajectories)


class TimedForks(ScriptedForks):
    async def fork(self, group, anchor, *, round_):
        forks, num_tokens = await super().fork(group, anchor, round_=round_)
        return timed(forks, generate_s=0.5, tool_s=0.25), num_tokens


@pytest.mark.parametrize("answers", [["42", "1"], ["1", "1"]], ids=["revived", "dead"])
async def test_seconds_are_those_of_roots_and_forks(answers):
    """Two roots of three turns, two forks of two."""
    found = await revived(timed(roots("1", "2"), generate_s=2.0, tool_s=1.0), TimedForks(answers))
    facts = group_result(found.scored, duration_s=1.0, facts=found.facts).facts
    assert (facts["generate_s"], facts["tool_s"]) == (6 * 2.0 + 4 * 0.5, 6 * 1.0 + 4 * 0.25)


async def test_forks_that_wait_for_step_scores_are_counted_so():
    async def score(group):
        await asyncio.sleep(0.05)
        return StepScores(raw=tuple((0.5,) * len(one.planner_turns) for one in group.trajectories), prm_digest="d")

    judge = GroupJudge(OutcomeReward(LearnerConfig(), max_turn_tokens=100), score)
    restarter = Restarter(FirstCallRestartsConfig(), ScriptedForks(["42", "1"]), judge, seed=0)
    found = await restarter.revive(await judge.judge(roots("1", "2")))
    assert group_result(found.scored, duration_s=1.0, facts=found.facts).facts["prm_s"] >= 0.05


async def test_stored_forks_come_back_with_their_roots_and_anchor():
    found = await revived(roots("1", "2"), ScriptedForks(["42", "1"]))
    assert scored_group_of(stored_group(found.scored)) == found.scored


async def scored_forks(*scores, depth, answers=("42", "1")):
    """Forks after so many searches, whose steps got these scores."""

    async def score(group):
        return StepScores(raw=scores[: len(group.trajectories)], prm_digest="d")

    anchor = Anchor(trajectory_id="g/0", num_turns=depth, source="random")
    forks, _ = await ScriptedForks(answers).fork(roots("1", "2"), anchor, round_=1)
    return await GroupJudge(OutcomeReward(LearnerConfig(), max_turn_tokens=100), score).judge(forks)


async def test_scores_of_what_forks_repeat_shift_no_step_that_they_sampled():
    bare = await scored_forks((0.9, 0.2), (0.9, 0.4), depth=1)
    long = await scored_forks((0.9, 0.9, 0.9, 0.2), (0.9, 0.9, 0.9, 0.4), depth=3)
    sampled, after_three = (
        [one[-1] for one in turn_advantages(scored, credit="outcome_gated", prm_weight=0.5)] for scored in (bare, long)
    )
    assert after_three == pytest.approx(sampled)


def test_sampled_tokens_are_those_of_roots_and_forks():
    assert all_sampled_tokens({"sampled_tokens": 1500.0, "fork_tokens": 500.0}) == 2000
    assert all_sampled_tokens({"sampled_tokens": 1500.0}) == 1500


def test_metrics_are_shares_of_the_groups_that_were_all_wrong():
    facts = {"dead_groups": 4.0, "anchored_groups": 3.0, "revived_groups": 1.0, "forks": 24.0}
    facts |= {"fork_tokens": 500.0, "inexact_forks": 0.0, "sampled_tokens": 1500.0}
    assert restart_metrics(facts) == {
        "restarts/dead_groups": 4,
        "restarts/anchored_share": 0.75,
        "restarts/revived_share": 0.25,
        "restarts/inexact_forks": 0,
        "restarts/fork_token_share": 0.25,
        "restarts/revived_per_1000_tokens": 2,
    }
    assert restart_metrics({"groups": 3.0}) == {}
