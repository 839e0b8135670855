import json
import random

import pytest

from configs.errors import UserError
from envs.types import Task, ToolCall, ToolResult
from reward.collected import outcome_of
from reward.prm.quality import ScoredStep, evaluate_prm, quality_report
from reward.prm.step_text import step_texts
from reward.prm.training import LabelledStep, PrmData
from rollout.types import Completion, Trajectory, Turn
from tests.changed import replace

ACTIONS = ("search", "calculator", "answer")


def make_steps(prefix, *, num_tasks=20, seed=0, score=lambda label, chars, rng: label):
    """Groups of 4 attempts of 3 steps; an attempt is right where its mean label is above one half."""
    rng = random.Random(seed)
    steps = []
    for task in range(num_tasks):
        for attempt in range(4):
            labels = [rng.choice((0.0, 0.2, 0.5, 0.7, 1.0)) for _ in ACTIONS]
            for step, label in enumerate(labels):
                chars = rng.randrange(20, 400)
                steps.append(
                    ScoredStep(
                        task_id=f"{prefix}{task}",
                        group_id="g",
                        trajectory_id=f"{prefix}{task}.{attempt}",
                        step=step,
                        label=label,
                        score=score(label, chars, rng),
                        num_chars=chars,
                        action=ACTIONS[step],
                        outcome=float(sum(labels) / 3 > 0.5),
                        valid=True,
                    )
                )
    return steps


def noisy(label, chars, rng):
    return 0.2 + 0.6 * label + rng.gauss(0, 0.25)


TRAIN = make_steps("train", seed=1)


def judge(held_out, *, seed=0, train=TRAIN, num_bootstrap=100):
    return quality_report(train, held_out, seed=seed, num_bootstrap=num_bootstrap)


def intervals(report):
    rows = [report, *report["best_of_n"].values()]
    return [(key, row[key], row[f"{key}_ci95"]) for row in rows for key in row if f"{key}_ci95" in row]


def test_perfect_prm_is_perfect_by_every_number():
    report = judge(make_steps("held"))
    ones = ("r2_over_constant", "r2_over_length", "spearman_overall", "spearman_within_group")
    assert [report[key] for key in (*ones, "pairwise_accuracy_within_group", "auroc_outcome")] == pytest.approx([1] * 6)
    assert [report[key] for key in ("mse", "mae", "ece", "bias")] == pytest.approx([0] * 4)
    assert all(row["mean_pred"] == pytest.approx(row["mean_label"]) for row in report["reliability"])
    for row in report["best_of_n"].values():
        assert row["share_of_headroom"] == pytest.approx(1.0)
        assert row["gain"] == pytest.approx(row["oracle"] - row["random"])
    assert (report["num_tasks_held_out"], report["num_steps"], report["num_trajectories"]) == (20, 240, 80)


def test_constant_prm_knows_nothing_and_is_not_said_to():
    """0.1 is the score whose mean over three steps is not 0.1 in floating point."""
    report = judge(make_steps("held", score=lambda *_: 0.1))
    for key in ("spearman_overall", "spearman_within_group", "pairwise_accuracy_within_group"):
        assert report[key] is None
        assert report[f"{key}_ci95"] is None
    assert report["num_groups_defined"] == 0
    assert report["auroc_outcome"] == report["auroc_outcome_baseline_constant"] == 0.5
    assert report["best_of_n"]["4"]["gain"] == pytest.approx(0.0)
    assert report["r2_over_constant"] < 0
    assert report["share_min_on_last"] == pytest.approx(1 / 3)


def test_prm_that_only_knows_actions_separates_outcomes_and_no_step_from_another_of_its_action():
    """Guessing at once is wrong and short, so that its mean score tells the outcome; no two searches are told apart."""
    steps = [
        ScoredStep(
            task_id=f"t{task}",
            group_id="g",
            trajectory_id=f"t{task}.{attempt}",
            step=step,
            label=label,
            score={"search": 0.9, "answer": 0.3}[action],
            num_chars=20,
            action=action,
            outcome=float(attempt == 0),
            valid=True,
        )
        for task in range(8)
        for attempt, turns in enumerate(
            ([("search", 1.0), ("search", 0.0), ("answer", 1.0)], [("answer", 0.0)], [("answer", 0.0)])
        )
        for step, (action, label) in enumerate(turns)
    ]
    report = judge(steps)
    assert report["auroc_outcome"] == 1.0
    assert {action: row["auroc"] for action, row in report["auroc_by_action"].items()} == {"search": 0.5, "answer": 0.5}
    assert (report["auroc_by_action"]["answer"]["num_right"], report["auroc_by_action"]["answer"]["num_wrong"]) == (
        8,
        16,
    )


def test_action_that_is_always_right_is_compared_with_nothing():
    steps = [replace(step, label=1.0) if step.action == "search" else step for step in make_steps("held")]
    assert set(judge(steps)["auroc_by_action"]) == {"answer", "calculator"}


def test_reversed_prm_is_worse_than_knowing_nothing():
    report = judge(make_steps("held", score=lambda label, *_: 1 - label))
    assert report["spearman_overall"] == pytest.approx(-1.0)
    assert report["spearman_within_group"] == pytest.approx(-1.0)
    assert report["pairwise_accuracy_within_group"] == 0.0
    assert report["auroc_outcome"] == pytest.approx(0.0)
    assert report["r2_over_length"] < 0
    assert report["best_of_n"]["2"]["gain"] < 0


def relabelled_by_length(steps):
    rng = random.Random(5)
    return [replace(one, label=min(max(one.num_chars / 400 + rng.gauss(0, 0.1), 0), 1)) for one in steps]


def test_prm_that_only_counts_characters_is_found_out():
    """Labels grow with length, so it looks good beside a constant, and has nothing beside the length rule."""
    train = relabelled_by_length(make_steps("train", num_tasks=60))
    held = relabelled_by_length(make_steps("held", num_tasks=60, seed=2, score=lambda _, chars, __: chars / 400))
    report = judge(held, train=train)
    assert report["r2_over_constant"] > 0.7
    assert report["r2_over_length"] == pytest.approx(0.0, abs=0.05)
    assert report["spearman_score_length"] == pytest.approx(1.0)
    assert report["spearman_within_group"] == pytest.approx(report["spearman_within_group_baseline_length"], abs=0.01)
    assert report["mse_baseline_length"] < report["mse_baseline_constant"]


def test_every_number_lies_in_its_interval():
    held = make_steps("held", score=noisy)
    report = judge(held)
    found = [row for row in intervals(report) if row[1] is not None]
    assert len(found) > 25
    # A constant has no other AUROC, and so an interval of no width.
    assert all(low <= value <= high for _, value, (low, high) in found)
    low, high = report["spearman_within_group_ci95"]
    assert 0 < low < high < 1


def test_steps_repeated_within_their_task_tell_nothing_new():
    held = make_steps("held", score=noisy)
    once, often = judge(held), judge(held * 5)
    for key in ("mse", "spearman_overall", "r2_over_length"):
        (low, high), (often_low, often_high) = once[f"{key}_ci95"], often[f"{key}_ci95"]
        assert often_high - often_low == pytest.approx(high - low, rel=0.1)


def test_more_tasks_narrow_the_interval():
    few, many = (judge(make_steps("held", num_tasks=count, score=noisy)) for count in (10, 160))
    widths = [report["mse_ci95"][1] - report["mse_ci95"][0] for report in (few, many)]
    assert widths[1] < widths[0] / 2


def test_report_depends_on_the_seed_and_not_on_the_order_of_the_steps():
    held = make_steps("held", score=noisy)
    shuffled = random.Random(1).sample(held, len(held))
    assert judge(held, seed=3) == judge(shuffled, seed=3)
    assert judge(held, seed=3)["mse_ci95"] != judge(held, seed=4)["mse_ci95"]


def test_report_is_plain_json():
    report = judge(make_steps("held", num_tasks=3, score=noisy))
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_malformed_steps_stay_in_and_are_counted():
    held = make_steps("held", score=noisy)
    held = [replace(held[0], valid=False, label=0.0, action=""), *held[1:]]
    report = judge(held)
    assert report["num_invalid_steps"] == 1
    assert report["num_steps"] == len(held)


def test_unjudged_trajectories_have_step_metrics_only():
    report = judge([replace(one, outcome=None) for one in make_steps("held", score=noisy)])
    assert report["num_trajectories_judged"] == 0
    assert report["auroc_outcome"] is None
    assert report["auroc_outcome_baseline_length"] is None
    assert report["best_of_n"]["2"]["num_groups"] == 0
    assert report["best_of_n"]["2"]["gain"] is None
    assert report["spearman_within_group"] > 0


def test_no_headroom_is_no_share_of_it():
    report = judge([replace(one, outcome=1.0) for one in make_steps("held", score=noisy)])
    assert report["best_of_n"]["4"]["gain"] == pytest.approx(0.0)
    assert report["best_of_n"]["4"]["share_of_headroom"] is None
    assert report["auroc_outcome"] is None


def test_aggregates_of_a_trajectory_are_told_apart():
    """The lowest score tells right from wrong, the last one tells the opposite, the mean nothing."""
    scores = {1.0: (0.5, 0.4, 0.3), 0.0: (0.2, 0.5, 0.5)}
    held = [
        replace(one, outcome=outcome, score=scores[outcome][one.step])
        for one in make_steps("held")
        for outcome in (float(one.trajectory_id[-1] in "01"),)
    ]
    report = judge(held)
    assert report["auroc_outcome_aggregate"] == "mean"
    assert (report["auroc_outcome"], report["auroc_outcome_min"], report["auroc_outcome_last"]) == (0.5, 1.0, 0.0)
    assert report["share_min_on_last"] == pytest.approx(0.5)


def test_groups_of_the_same_name_in_two_tasks_are_two_groups():
    assert judge(make_steps("held", score=noisy))["num_groups"] == 20


def test_single_task_has_numbers_and_no_intervals():
    report = judge(make_steps("held", num_tasks=1, score=noisy))
    assert report["mse"] > 0
    assert all(interval is None for _, _, interval in intervals(report))


def test_empty_side_is_refused():
    with pytest.raises(UserError, match="and 0 held out"):
        judge([])
    with pytest.raises(UserError, match="got 0 to train on"):
        judge(TRAIN, train=[])


def test_outcome_is_asked_once_for_each_held_out_attempt(monkeypatch):
    """Regression: a scorer of one's own, which may be a paid model, was asked anew for every labelled step, the ones
    that were trained on, too."""
    turn = Turn.of(
        role="planner",
        prompt_token_ids=(1,),
        completion=Completion(token_ids=(1,), logprobs=(0.0,), text="x", finish_reason="stop", policy_version=0),
        trainable=True,
        tool_call=ToolCall(name="think", arguments="x"),
        tool_result=ToolResult(text="ok"),
    )
    attempts = [
        Trajectory(
            id=f"{name}/{number}",
            group_id=name,
            task=Task(id=name, dataset="arith", question=name, answer="1"),
            turns=(turn, turn, turn),
            answer=str(number),
            stop_reason="answered",
        )
        for name in ("train", "one", "two")
        for number in range(2)
    ]
    steps = [LabelledStep(step=step, label=step.step / 2) for attempt in attempts for step in step_texts(attempt)]
    data = PrmData(train=tuple(steps[:6]), held_out=tuple(steps[6:]))
    asked = []
    monkeypatch.setattr("reward.prm.quality.outcome_of", lambda one: asked.append(one.id) or outcome_of(one))
    report = evaluate_prm(data, attempts, score=lambda steps: [0.5 + step.step / 10 for step in steps], seed=0)
    assert sorted(asked) == ["one/0", "one/1", "two/0", "two/1"]
    assert report["num_trajectories_judged"] == 4
    assert report["auroc_outcome"] == 0.5
