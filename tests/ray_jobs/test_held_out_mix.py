from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
from evaluating import ScriptedSolver, broken, config_for, right_answer

from configs.errors import UserError
from configs.loading import load_run_config
from envs.datasets.sampler import evaluation_tasks
from envs.types import Task
from ray_jobs.evaluation_folder import Evaluation, Item
from ray_jobs.held_out import (
    evaluate,
    evaluate_step,
    held_out_metrics,
    tasks_while_training,
)
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.preflight import PreflightError, check_before_acting
from ray_jobs.run.summary import _by_dataset, _verdict, mean_scores
from rollout.codec import flat_record, read_trajectories
from rollout.engines.engine import EngineError
from rollout.records import read_records
from rollout.types import Reward, Trajectory

MIX = "envs.mix={lookup=0.9, two_lookup=0.1}"
HELD_OUT = "evaluation.mix={lookup=0.5, two_lookup=0.3, branch=0.2}"


def drawn(*overrides):
    config = load_run_config(None, [MIX, "evaluation.num_tasks=500", *overrides])
    return Counter(task.dataset for task in evaluation_tasks(config))


def test_held_out_tasks_follow_the_training_mix_by_default():
    assert drawn() == {"lookup": 450, "two_lookup": 50}
    assert drawn(HELD_OUT) == {"lookup": 250, "two_lookup": 150, "branch": 100}


@pytest.mark.parametrize("mix", ["{}", "{lookup=-1}", "{lookup=0}"])
def test_mix_without_a_share_is_rejected(mix):
    with pytest.raises(UserError, match=r"evaluation\.mix"):
        load_run_config(None, [f"evaluation.mix={mix}"])


def test_unknown_family_in_the_held_out_mix_is_rejected():
    with pytest.raises(PreflightError, match=r"evaluation\.mix"):
        check_before_acting(load_run_config(None, ["evaluation.mix={nonsense=1}"]), draws_tasks=True)


def attempt(dataset, index, reward):
    """Return an attempt with this reward, or without a score for None."""
    task = Task(id=f"{dataset}-{index}", dataset=dataset, question="?", answer="1")
    stop_reason = "infrastructure" if reward is None else "answered"
    return Trajectory(
        id="t",
        group_id="g",
        task=task,
        turns=(),
        answer=None if reward is None else "1",
        stop_reason=stop_reason,
        reward=Reward(outcome=reward, total=reward),
    )


def evaluation(rewards):
    """Return an evaluation from the rewards of each data set, with None for an unscored attempt."""
    rows = ((name, index, reward) for name, found in rewards.items() for index, reward in enumerate(found))
    attempts = (attempt(name, index, None if reward is None else float(reward)) for name, index, reward in rows)
    return Evaluation(items=tuple(Item.of(flat_record(one)) for one in attempts))


def test_mean_scores_are_of_the_same_tasks():
    def scored(*rewards):
        return evaluation({"lookup": rewards})

    assert mean_scores(scored(0.0, 1.0), scored(1.0, 1.0)) == {}
    assert mean_scores(scored(0.0, None), scored(0.5, 1.0)) == {"before": 0.0, "after": 0.5}
    assert [item.solved for item in scored(0.5, 1.0, None).items] == [False, True, False]


def test_summary_has_a_row_for_each_family():
    before = evaluation({"lookup": "0" * 8, "branch": "0" * 4})
    after = evaluation({"lookup": "11111100", "branch": "1111"})
    table = _by_dataset(before, after, {"lookup": 1.0})
    assert [(row["num"], row["before"], row["after"], row["trained"]) for row in table.values()] == [
        (8, 0.0, 0.75, True),
        (4, 0.0, 1.0, False),
    ]
    # Six and four of as many in one direction: 2 / 2^6 and 2 / 2^4.
    assert [row["mcnemar_p"] for row in table.values()] == [2 / 64, 2 / 16]


def test_comparison_is_on_tasks_that_both_have_scored():
    before = evaluation({"lookup": [None, "0", "1", "0"], "branch": ["0"]})
    after = evaluation({"lookup": ["1", None, "1", "1"], "branch": [None]})
    found = before.compared_with(after)
    assert (found.num_tasks, found.before, found.after) == (2, 0.5, 1.0)
    assert before.paired_with(after) == [(True, True), (False, True)]
    assert list(_by_dataset(before, after, {})) == ["lookup"]
    left_out = [key.task_id for key in (*before.unscored, *after.unscored)]
    assert left_out == ["lookup-0", "lookup-1", "branch-0"]
    assert "3 tasks are left out" in _verdict(found, left_out)


@pytest.fixture
def evaluated(tmp_path):
    """Run a phase over three held-out tasks, and return its results, requests, records and notes."""

    def run(answer_of, *overrides, phase="eval_after"):
        solver, told, progress = ScriptedSolver(answer_of), [], []
        settings = ("evaluation.num_tasks=3", "envs.mix={lookup=1}", *overrides)
        config = config_for(tmp_path, *settings)

        @contextmanager
        def phase_of(name, total):
            yield SimpleNamespace(advance=lambda: progress.append(name))

        with RunFolder.create(config) as folder:
            stage = SimpleNamespace(
                config=config,
                folder=folder,
                rollouts=solver,
                phase=phase_of,
                finished=lambda name: None,
                console=SimpleNamespace(note=told.append),
            )
            found = evaluate(stage, phase)
            stage.finished = lambda name: {}
            assert evaluate(stage, phase) == found
        rows = list(map(flat_record, read_trajectories(folder.path / "trajectories.jsonl")))
        assert len(progress) == 3
        said = " ".join(told)
        return SimpleNamespace(found=found, asked=solver.asked, rows=rows, said=said, tasks=evaluation_tasks(config))

    return run


def test_failed_attempts_are_retried_and_then_unscored(evaluated):
    tries = Counter()

    def answer(task, seed):
        tries[task.id] += 1
        gone = task.id.endswith("-2") or (task.id.endswith("-1") and tries[task.id] == 1)
        return EngineError("gone") if gone else right_answer(task)

    run = evaluated(answer)
    assert {row["task_id"][-2:]: row["reward"] for row in run.rows} == {"-0": 1.0, "-1": 1.0, "-2": None}
    assert sorted(tries.values()) == [1, 2, 3]
    assert list(run.found.solved.values()) == [True, True]
    assert [key.task_id[-2:] for key in run.found.unscored] == ["-2"]
    assert f"lookup/{run.found.unscored[0].task_id}/0" in run.said


def test_records_have_the_order_of_the_tasks_and_attempts_are_greedy(evaluated):
    first = []

    def answer(task, seed):
        first.append(task.id)
        # The first one asked is tried again and so is the last one done.
        return EngineError("gone") if len(first) == 1 else "no"

    run = evaluated(answer)
    assert [row["task_id"] for row in run.rows] == [task.id for task in run.tasks]
    assert {row["id"].partition("/")[0] for row in run.rows} == {"eval_after"}
    assert {asked[2:] for asked in run.asked} == {(0, 0.0)}


def test_untouched_model_gets_tasks_of_each_data_set(evaluated, tmp_path):
    """Tasks of data sets that are not generated come in blocks."""
    (tmp_path / "own.jsonl").write_text(
        "".join(f'{{"question": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(40))
    )
    own = ("envs.mix={lookup=0.5, own_integer=0.5}", "evaluation.num_tasks=6", "evaluation.num_untouched_tasks=3")
    run = evaluated(
        lambda task, seed: task.answer, *own, f"envs.data_path={tmp_path}/own.jsonl", phase="eval_untouched"
    )
    assert {task.dataset for task in run.tasks[:3]} == {"lookup"}
    assert Counter(row["dataset"] for row in run.rows) == {"lookup": 2, "own_integer": 1}


def test_each_data_set_has_its_share_of_the_tasks_while_training():
    config = load_run_config(None, [HELD_OUT, "evaluation.num_tasks=40", "evaluation.while_training_tasks=10"])
    whole, some = evaluation_tasks(config), tasks_while_training(config)
    assert Counter(task.dataset for task in some) == {"lookup": 5, "two_lookup": 3, "branch": 2}
    assert some == [task for task in whole if task in some]
    few = load_run_config(None, [HELD_OUT, "evaluation.num_tasks=20"])
    assert tasks_while_training(few) == evaluation_tasks(few)


def test_curve_has_rates_with_intervals_for_each_family_and_all():
    found = held_out_metrics(evaluation({"lookup": ["1", "0", None], "branch": ["1", "1"], "arith": [None]}))
    assert {name: value for name, value in found.items() if "solve_rate" in name} == {
        "held_out/solve_rate": 0.75,
        "held_out/solve_rate/lookup": 0.5,
        "held_out/solve_rate/branch": 1.0,
    }
    assert (found["held_out/tasks"], found["held_out/tasks/lookup"], found["held_out/unscored"]) == (4, 2, 2)
    # Wilson, 2 of 2.
    assert (found["held_out/low/branch"], found["held_out/high/branch"]) == pytest.approx((0.342, 1.0), abs=1e-3)
    # One family is all there is.
    assert not any(name.count("/") > 1 for name in held_out_metrics(evaluation({"lookup": ["1"]})))


@pytest.fixture
def stage(tmp_path):
    """A run in its RL loop with policy version 3."""
    settings = ("evaluation.num_tasks=8", "evaluation.while_training_tasks=4", "envs.mix={lookup=0.5,branch=0.5}")
    config, told = config_for(tmp_path, "evaluation.every_steps=1", *settings), []
    solver = ScriptedSolver(lambda task, seed: "no" if task.dataset == "branch" else right_answer(task))
    solver.policy_version = 3
    with RunFolder.create(config) as folder:
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
    assert (row["held_out/solve_rate/lookup"], row["held_out/solve_rate/branch"]) == (1.0, 0.0)
    attempts = list(read_trajectories(stage.folder.path / "trajectories.jsonl"))
    assert [one.task.id for one in attempts] == [task.id for task in tasks_while_training(stage.config)]
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


def test_broken_attempts_while_training_do_not_end_the_run(stage):
    stage.solver.answer_of = broken
    evaluate_step(stage, 1)
    (row,) = held_out_rows(stage.folder)
    assert row["held_out/unscored"] == 4
    assert "held_out/solve_rate" not in row
    assert len(stage.told) == 1
