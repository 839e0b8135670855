from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from evaluating import ScriptedSolver, config_for, right_answer
from view_world import make_turn

from configs.loading import load_run_config
from envs.datasets.sampler import evaluation_tasks
from envs.types import Task
from ray_jobs.evaluation import Evaluation, items_of
from ray_jobs.held_out import SHOWN_STEPS, evaluate_step, held_out_metrics, shown_attempt
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.summary import _by_dataset
from rollout.codec import flat_record, read_trajectories
from rollout.files import read_records
from rollout.types import Reward, Trajectory

MIX = "envs.mix={lookup=0.9, two_lookup=0.1}"
HELD_OUT = "evaluation.mix={lookup=0.5, two_lookup=0.3, chain=0.2}"


def drawn(*overrides):
    config = load_run_config(None, [MIX, "evaluation.num_tasks=500", *overrides])
    return Counter(task.dataset for task in evaluation_tasks(config))


def test_held_out_tasks_follow_the_training_mix_by_default():
    assert drawn() == {"lookup": 450, "two_lookup": 50}
    assert drawn(HELD_OUT) == {"lookup": 250, "two_lookup": 150, "chain": 100}


def attempt(dataset, index, reward):
    """Return an attempt with this reward, or without a score for None."""
    task = Task(id=f"{dataset}-{index}", dataset=dataset, question="?", answer="1")
    end = {"answer": None, "stop_reason": "infrastructure"} if reward is None else {"answer": "1"}
    end = {"stop_reason": "answered", "reward": Reward(outcome=reward, total=reward)} | end
    return Trajectory(id="t", group_id="g", task=task, turns=(), **end)


def test_shown_attempt_has_one_line_for_each_step_whatever_it_contains():
    shown = attempt("lookup", 0, 0.5)
    malformed = make_turn(format_error="no\nJSON", tool_call=None)
    shown.turns = (malformed, *[make_turn(action="code", text="1\n+1", result="2\n" * 900)] * 20)
    lines = list(shown_attempt(shown))
    assert len(lines) == SHOWN_STEPS + 2
    assert not any("\n" in line or len(line) > 300 for line in lines)
    assert lines[-1].endswith("(score 0.5)")
    assert list(shown_attempt(attempt("lookup", 0, None)))[-1].endswith("(unscored)")


def evaluation(rewards):
    """Return an evaluation from the rewards of each data set, with None for an unscored attempt."""
    rows = ((name, index, reward) for name, found in rewards.items() for index, reward in enumerate(found))
    attempts = (attempt(name, index, None if reward is None else float(reward)) for name, index, reward in rows)
    return Evaluation(items=items_of(map(flat_record, attempts)))


def test_summary_has_a_row_for_each_family():
    before = evaluation({"lookup": "0" * 8, "chain": "0" * 4})
    after = evaluation({"lookup": "11111100", "chain": "1111"})
    table = _by_dataset(before, after, {"lookup": 1.0})
    assert [(row["num"], row["before"], row["after"], row["trained"]) for row in table.values()] == [
        (8, 0.0, 0.75, True),
        (4, 0.0, 1.0, False),
    ]
    # Six and four of as many in one direction: 2 / 2^6 and 2 / 2^4.
    assert [row["mcnemar_p"] for row in table.values()] == [2 / 64, 2 / 16]


def test_comparison_is_on_tasks_that_both_have_scored():
    before = evaluation({"lookup": [None, "0", "1", "0"], "chain": ["0"]})
    after = evaluation({"lookup": ["1", None, "1", "1"], "chain": [None]})
    found = before.compared_with(after)
    assert (found.num_tasks, found.before, found.after) == (2, 0.5, 1.0)
    assert before.paired_with(after) == [(True, True), (False, True)]
    assert list(_by_dataset(before, after, {})) == ["lookup"]
    left_out = [*before.unscored, *after.unscored]
    assert left_out == ["lookup/lookup-0/0", "lookup/lookup-1/0", "chain/chain-0/0"]


def test_curve_has_rates_with_intervals_for_each_family_and_all():
    found = held_out_metrics(evaluation({"lookup": ["1", "0", None], "chain": ["1", "1"], "difference": [None]}))
    assert {name: value for name, value in found.items() if "solve_rate" in name} == {
        "held_out/solve_rate": 0.75,
        "held_out/solve_rate/lookup": 0.5,
        "held_out/solve_rate/chain": 1.0,
    }
    assert (found["held_out/tasks"], found["held_out/tasks/lookup"], found["held_out/unscored"]) == (4, 2, 2)
    # Wilson, 2 of 2.
    assert (found["held_out/low/chain"], found["held_out/high/chain"]) == pytest.approx((0.342, 1.0), abs=1e-3)
    # One family is all there is.
    assert not any(name.count("/") > 1 for name in held_out_metrics(evaluation({"lookup": ["1"]})))


@pytest.fixture
def stage(tmp_path):
    """A run in its RL loop with policy version 3."""
    settings = ("evaluation.num_tasks=8", "evaluation.while_training_tasks=4", "envs.mix={lookup=0.5,chain=0.5}")
    config, told = config_for(tmp_path, "evaluation.every_steps=1", *settings), []
    solver = ScriptedSolver(lambda task, seed: "no" if task.dataset == "chain" else right_answer(task))
    solver.policy_version = 3
    with RunFolder.open(config) as folder:
        yield SimpleNamespace(
            config=config,
            folder=folder,
            rollouts=solver,
            supervisor=SimpleNamespace(readings=list),
            solver=solver,
            log_metrics=folder.log_metrics,
            console=SimpleNamespace(note=told.append, waiting=lambda what: nullcontext()),
            told=told,
        )


def held_out_rows(folder):
    return [row for row in read_records(folder.path / "metrics.jsonl") if "held_out/unscored" in row]


def test_evaluation_while_training_logs_metrics_and_attempts(stage):
    evaluate_step(stage, 5)
    (row,) = held_out_rows(stage.folder)
    assert (row["step"], row["held_out/solve_rate"], row["held_out/policy_version"]) == (5, 0.5, 3)
    assert (row["held_out/solve_rate/lookup"], row["held_out/solve_rate/chain"]) == (1.0, 0.0)
    attempts = list(read_trajectories(stage.folder.path / "trajectories.jsonl"))
    assert Counter(one.task.dataset for one in attempts) == {"lookup": 2, "chain": 2}
    assert {(one.phase, one.step, one.group_id) for one in attempts} == {("held_out", 5, "held_out-5")}
    assert {asked[3] for asked in stage.solver.asked} == {0.0}
    assert len(stage.told) == 1


def test_rewind_keeps_the_evaluations_up_to_the_checkpoint(stage):
    for step in (1, 2, 3):
        evaluate_step(stage, step)
    stage.folder.rewind(2)
    evaluate_step(stage, 3)
    stage.folder.rewind(3)
    assert [row["step"] for row in held_out_rows(stage.folder)] == [1, 2, 3]
    attempts = Counter(one.step for one in read_trajectories(stage.folder.path / "trajectories.jsonl"))
    assert attempts == {1: 4, 2: 4, 3: 4}
