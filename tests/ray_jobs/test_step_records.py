"""What a train step leaves for the viewer: every trained group, and where each advantage came from."""

import json
import math

import numpy as np
import pytest
from reward.stored import scored_group_of, stored_group
from rollout.store.lifecycle import GroupCounts

from configs.reward import Credit
from envs.types import Task, ToolCall, ToolResult
from learner.credit import CreditedStep, credit_parts, turn_logprobs
from ray_jobs.run.step_records import step_records
from reward.types import Reward, ScoredGroup, StepScores
from rollout.buffer import Batch
from rollout.records import head_of, line_of, readable, trajectory_of
from rollout.types import Completion, Group, Trajectory, Turn, VersionSwitch
from tests.changed import replace

TASK = Task(id="t", dataset="arith", question="6*7?", answer="42")
Z = math.sqrt(0.5)
"""One right, one wrong: (1 - 0.5) / 0.7071."""


def make_turn(prompt, *, switches=()):
    completion = Completion(
        token_ids=(7, 8),
        logprobs=(-1.0, -2.0),
        text="x",
        finish_reason="stop",
        policy_version=1,
        switches=switches,
    )
    return Turn.of(
        role="planner",
        prompt_token_ids=prompt,
        completion=completion,
        trainable=True,
        tool_call=ToolCall(name="think", arguments="x"),
        tool_result=ToolResult(text="ok"),
    )


def make_trajectory(index, num_turns=1, **changes):
    turns = tuple(make_turn((1, 2) + (7, 8, 99) * number, **changes) for number in range(num_turns))
    return Trajectory(id=f"g/{index}", group_id="g", task=TASK, turns=turns, answer="42", stop_reason="answered")


def make_scored(*trajectories, totals=(1.0, 0.0), raw=None):
    return ScoredGroup(
        group=Group(id="g", trajectories=trajectories),
        rewards=tuple(Reward(outcome=total, total=total, parts={}) for total in totals),
        step_scores=None if raw is None else StepScores(raw=raw, prm_digest="d"),
    )


def make_batch(*scored, untrained=()):
    return Batch(
        step=3,
        payloads=tuple(map(stored_group, scored)),
        untrained=untrained,
        version_ages=dict.fromkeys((0, 1, 2), 0),
        facts={},
        bias={},
        counts=GroupCounts(),
        warning=None,
    )


def shown(batch, result):
    """As the file has them."""
    return [readable(json.loads(one.line())) for one in step_records(batch, batch.payloads, result)]


def records(batch, *, logprobs=None, credit: Credit = "outcome_gated", weight=0.5, skipped=None):
    parts = {
        scored.group.id: credit_parts(scored, credit=credit, prm_weight=weight)
        for scored in map(scored_group_of, batch.payloads)
    }
    result = CreditedStep(policy_version=4, metrics={}, skipped=skipped, turn_logprobs=logprobs or {}, credit=parts)
    return shown(batch, result)


def test_an_advantage_is_its_outcome_part_and_its_process_part():
    """Mapped scores are 0.05 + 0.95 raw: 0.905, 0.525 and 0.145, mean 0.525 and sample deviation 0.38."""
    scored = make_scored(make_trajectory(0, 2), make_trajectory(1), raw=((0.9, 0.5), (0.1,)))
    first, second = records(make_batch(scored))
    assert first["outcome_parts"] == pytest.approx([Z, Z], abs=1e-5)
    assert first["process_parts"] == pytest.approx([0.5, 0.0], abs=1e-5)
    assert first["advantages"] == pytest.approx([Z + 0.5, Z], abs=1e-5)
    assert second["advantages"] == pytest.approx([-Z - 0.5], abs=1e-5)
    assert first["step_rewards"] == [0.905, 0.525]
    assert (first["credit"]["scheme"], first["credit"]["weight"]) == ("outcome_gated", 0.5)
    assert first["credit"]["totals"] == pytest.approx({"num": 2, "mean": 0.5, "std": Z})
    assert first["credit"]["scores"] == pytest.approx({"num": 3, "mean": 0.525, "std": 0.38})
    assert (first["verdict"], first["trained_as"]) == ("trained", 4)


def test_what_is_shown_is_the_credit_that_was_trained_on_and_not_computed_again():
    scored = make_scored(make_trajectory(0), make_trajectory(1))
    trained = replace(credit_parts(scored, credit="outcome", prm_weight=0.0), advantages=[[0.125], [-0.25]])
    result = CreditedStep(policy_version=4, metrics={}, credit={scored.group.id: trained})
    assert [one["advantages"] for one in shown(make_batch(scored), result)] == [[0.125], [-0.25]]


def test_records_of_a_refused_batch_say_why_and_name_no_version():
    first, _ = records(make_batch(make_scored(make_trajectory(0), make_trajectory(1))), skipped="step skipped: because")
    assert (first["verdict"], first["reason"]) == ("refused", "step skipped: because")
    assert "trained_as" not in first
    assert first["advantages"] == pytest.approx([Z], abs=1e-5)


def test_without_scores_all_of_it_is_the_outcome_whatever_the_recipe_says():
    parts = credit_parts(make_scored(make_trajectory(0), make_trajectory(1)), credit="outcome_gated", prm_weight=0.5)
    assert (parts.scheme, parts.weight, parts.processes) == ("outcome", 0.0, [[0.0], [0.0]])
    assert parts.advantages == parts.outcomes


def test_learner_log_probs_stand_beside_the_tokens_that_were_trained():
    """Version 1 sampled the first token, version 2 the second; tokens before version 2 were not trained."""
    trajectory = make_trajectory(0, 2, switches=(VersionSwitch(index=1, policy_version=2),))
    by_turn = turn_logprobs(trajectory, {"g/0": np.array([-2.25, -2.5], dtype=np.float32)}, {2: 0})
    batch = make_batch(make_scored(trajectory, make_trajectory(1)))
    first, second = records(batch, logprobs={"g/0": by_turn})
    assert [turn["learner_logprobs"] for turn in first["turns"]] == [[None, -2.25], [None, -2.5]]
    assert "learner_logprobs" not in second["turns"][0]


def test_all_groups_of_a_step_are_there_and_some_that_were_filtered_with_their_reason():
    filtered = stored_group(make_scored(make_trajectory(0), totals=(0.0,)))
    failed = stored_group(make_scored(make_trajectory(1), totals=(None,)))
    trained = make_scored(make_trajectory(2), make_trajectory(3))
    batch = make_batch(
        trained, trained, untrained=(("all_wrong", "", filtered), ("failed", "1 of 1 infrastructure", failed))
    )
    rows = records(batch)
    assert [row["verdict"] for row in rows] == ["trained"] * 4 + ["all_wrong", "failed"]
    assert {row["step"] for row in rows} == {3}
    assert rows[-1]["reason"] == "1 of 1 infrastructure"
    assert "advantages" not in rows[-1]


def test_the_head_of_a_line_says_all_but_the_turns_even_of_a_hostile_question():
    task = Task(id="t", dataset="arith", question='", "turns": [{"role": "x', answer="42")
    trajectory = Trajectory(
        id="g/0", group_id="g", task=task, turns=(make_turn((1, 2)),), answer=None, stop_reason="format"
    )
    (record,) = records(
        make_batch(untrained=(("all_wrong", "", stored_group(make_scored(trajectory, totals=(0.0,)))),))
    )
    head = head_of(json.dumps(record, ensure_ascii=False).encode())
    assert head == {name: value for name, value in record.items() if name != "turns"}
    assert (head["num_turns"], head["num_tokens"], head["versions"]) == (1, 2, [1, 1])
    assert trajectory_of(record) == trajectory


def test_siblings_that_made_the_very_step_are_told_with_their_advantages():
    """The first steps are the same decision after the same prompt; the second one has another prompt."""
    scored = make_scored(make_trajectory(0, 2), make_trajectory(1), raw=((0.9, 0.5), (0.1,)))
    first, second = records(make_batch(scored))
    shared = [first["advantages"][0], second["advantages"][0]]
    assert first["same_steps"] == [shared, [first["advantages"][1]]]
    assert second["same_steps"] == [shared]


def test_attempt_that_could_not_be_scored_made_no_step_that_is_trained():
    trajectories = [make_trajectory(number) for number in range(3)]
    scored = make_scored(*trajectories, totals=(1.0, 0.0, None), raw=((0.9,), (0.1,), (0.5,)))
    assert [len(one["same_steps"][0]) for one in records(make_batch(scored))] == [2, 2, 2]


def test_mean_score_of_each_action_is_beside_the_mean_of_all():
    """Mapped scores 0.905, 0.525 and 0.145, all of `think`."""
    scored = make_scored(make_trajectory(0, 2), make_trajectory(1), raw=((0.9, 0.5), (0.1,)))
    by_action = records(make_batch(scored))[0]["credit"]["by_action"]
    assert by_action == {"think": {"num": 3, "mean": pytest.approx(0.525), "std": pytest.approx(0.38)}}


@pytest.mark.parametrize(
    "said", ["Äpfel 苹果 \U0001f34e", '", "turns": [', "half a pair \ud800", "\\ud800", "\u2028\r\n"]
)
def test_what_a_worker_wrote_is_taken_over_and_what_no_file_can_hold_is_a_question_mark(said):
    turn = replace(make_turn((1, 2)), thought=said, tool_result=ToolResult(text=said))
    trajectory = replace(make_trajectory(0), turns=(turn,), answer=said)
    (line,) = step_records(
        make_batch(untrained=(("all_wrong", "", stored_group(make_scored(trajectory, totals=(0.0,)))),)),
        (),
        CreditedStep(policy_version=4, metrics={}, credit={}),
    )
    shown_as = said.encode(errors="replace").decode()
    record = json.loads(line.line())
    assert (record["answer"], record["turns"][0]["thought"], record["turns"][0]["result"]) == (shown_as,) * 3
    assert line.line() == line_of(record)
    assert line.record()["turns"][0]["thought"] == said
