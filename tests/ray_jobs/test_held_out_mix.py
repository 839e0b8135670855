from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
from evaluating import HESITANT, ScriptedSolver, broken, config_for, right_answer

from configs.errors import UserError
from configs.loading import load_run_config
from envs.datasets.sampler import evaluation_tasks
from envs.types import Task
from ray_jobs.held_out import (
    Evaluation,
    evaluate,
    evaluate_step,
    held_out_metrics,
    tasks_while_training,
)
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.preflight import PreflightError, check_before_acting
from ray_jobs.run.summary import _by_dataset, _verdict, mean_scores
from rollout.codec import read_trajectories
from rollout.engines.engine import EngineError
from rollout.records import read_records
from rollout.types import Reward, Trajectory

MIX = "envs.mix={lookup=0.9, two_lookup=0.1}"
HELD_OUT = "evaluation.mix={lookup=0.5, two_lookup=0.3, branch=0.2}"


def drawn(*overrides):
    config = load_run_config(None, [MIX, "evaluation.num_tasks=500", *overrides])
    return Counter(task.dataset for task in evaluation_tasks(config))


def test_held_out_tasks_follow_the_training_mix_unless_told_otherwise():
    assert drawn() == {"lookup": 450, "two_lookup": 50}
    assert drawn(HELD_OUT) == {"lookup": 250, "two_lookup": 150, "branch": 100}


def test_held_out_tasks_of_a_family_do_not_depend_on_what_else_is_held_out():
    config = load_run_config(None, ["evaluation.num_tasks=40", "evaluation.mix={arith=1}"])
    both = load_run_config(None, ["evaluation.num_tasks=80", "evaluation.mix={arith=1, branch=1}"])
    alone = {task.question for task in evaluation_tasks(config)}
    assert alone == {task.question for task in evaluation_tasks(both) if task.dataset == "arith"}


@pytest.mark.parametrize("mix", ["{}", "{lookup=-1}", "{lookup=0}"])
def test_mix_without_a_share_is_refused(mix):
    with pytest.raises(UserError, match="shares must be >= 0"):
        load_run_config(None, [f"evaluation.mix={mix}"])


def test_unknown_family_in_the_held_out_mix_is_named():
    with pytest.raises(PreflightError, match=r"evaluation.mix names unknown data set 'nonsense'"):
        check_before_acting(load_run_config(None, ["evaluation.mix={nonsense=1}"]), draws_tasks=True)


def attempt(dataset, index, reward):
    """An attempt with this reward; None for one that could not be scored."""
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


def evaluation(_, answers):
    """`answers` maps a data set to what its tasks were answered, None where no attempt could be scored."""
    return Evaluation.of(
        attempt(dataset, index, None if one is None else float(one))
        for dataset, found in answers.items()
        for index, one in enumerate(found)
    )


def test_mean_scores_of_the_same_tasks_are_told_where_a_scorer_gave_something_between():
    def evaluation(*rewards):
        return Evaluation.of(attempt("lookup", index, reward) for index, reward in enumerate(rewards))

    assert mean_scores(evaluation(0.0, 1.0), evaluation(1.0, 1.0)) == {}
    assert mean_scores(evaluation(0.0, None), evaluation(0.5, 1.0)) == {"before": 0.0, "after": 0.5}
    assert [item.solved for item in evaluation(0.5, 1.0, None).items] == [False, True, False]


def test_summary_tells_each_family_apart_and_which_was_never_trained_on():
    before = evaluation("b", {"lookup": "0" * 8, "branch": "0" * 4})
    after = evaluation("a", {"lookup": "11111100", "branch": "1111"})
    table = _by_dataset(before, after, {"lookup": 1.0})
    assert [(row["num"], row["before"], row["after"], row["trained"]) for row in table.values()] == [
        (8, 0.0, 0.75, True),
        (4, 0.0, 1.0, False),
    ]
    # Six and four of as many in one direction: 2 / 2^6 and 2 / 2^4.
    assert [row["mcnemar_p"] for row in table.values()] == [2 / 64, 2 / 16]


def test_before_and_after_compare_the_tasks_that_both_could_be_scored_on():
    before = evaluation("b", {"lookup": [None, "0", "1", "0"], "branch": ["0"]})
    after = evaluation("a", {"lookup": ["1", None, "1", "1"], "branch": [None]})
    found = before.compared_with(after)
    assert (found.num_tasks, found.before, found.after) == (2, 0.5, 1.0)
    assert before.paired_with(after) == [(True, True), (False, True)]
    assert list(_by_dataset(before, after, {})) == ["lookup"]
    left_out = [key.task_id for key in (*before.unscored, *after.unscored)]
    assert left_out == ["lookup-0", "lookup-1", "branch-0"]
    assert _verdict(found, left_out).endswith(
        "on 2 paired tasks; 3 tasks are left out, which could not be scored before, after or in both"
    )


def test_nothing_that_both_could_be_scored_on_is_no_comparison():
    before, after = evaluation("b", {"lookup": [None, "0"]}), evaluation("a", {"lookup": ["1", None]})
    assert before.compared_with(after) is None
    assert _verdict(None, ["lookup/0", "lookup/1"]).startswith("not measured; 2 tasks are left out")


@pytest.fixture
def evaluated(tmp_path):
    """The phase of a run over three held-out tasks, and what was asked, written and said."""

    def run(answer_of, *overrides, phase="eval_after"):
        solver, told, progress = ScriptedSolver(answer_of), [], []
        settings = ("evaluation.num_tasks=3", "evaluation.max_attempts=2", "envs.mix={lookup=1}", *overrides)
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
        rows = list(read_trajectories(folder.path / "trajectories.jsonl"))
        assert len(progress) == 3
        said = " ".join(told)
        return SimpleNamespace(found=found, asked=solver.asked, rows=rows, said=said, tasks=evaluation_tasks(config))

    return run


def test_a_run_tries_a_broken_engine_again_and_names_what_stays_unscored(evaluated):
    tries = Counter()

    def answer(task, seed):
        tries[task.id] += 1
        gone = task.id.endswith("-2") or (task.id.endswith("-1") and tries[task.id] == 1)
        return EngineError("gone") if gone else right_answer(task)

    run = evaluated(answer)
    assert {row.task.id[-2:]: row.outcome for row in run.rows} == {"-0": 1.0, "-1": 1.0, "-2": None}
    assert {id[-2:]: num for id, num in tries.items()} == {"-0": 1, "-1": 2, "-2": 2}
    assert list(run.found.solved.values()) == [True, True]
    assert [key.task_id[-2:] for key in run.found.unscored] == ["-2"]
    assert "after RL: 2 of 2 held-out tasks right; 1 more are unscored" in run.said
    unscored = f"lookup/{run.found.unscored[0].task_id}/0"
    assert f"unscored, because the engine or a tool failed at every attempt: {unscored}" in run.said


def test_a_run_does_not_blame_the_engine_for_what_a_scorer_cannot_tell(evaluated):
    run = evaluated(lambda task, seed: "who knows" if task.id.endswith("-2") else task.answer, *HESITANT)
    assert len(run.asked) == 3
    unscored = f"lookup/{run.found.unscored[0].task_id}/0"
    assert f"1 more are unscored, because a scorer of one's own could not tell: {unscored}" in run.said


def test_a_run_whose_engine_always_fails_scores_nothing_as_wrong(evaluated):
    run = evaluated(broken)
    assert (run.found.solved, len(run.found.unscored), len(run.asked)) == ({}, 3, 6)
    assert {row.outcome for row in run.rows} == {None}


def test_a_run_writes_its_evaluation_in_the_order_of_the_tasks_and_asks_greedily(evaluated):
    first = []

    def answer(task, seed):
        first.append(task.id)
        # The first one asked is tried again and so is the last one done.
        return EngineError("gone") if len(first) == 1 else "no"

    run = evaluated(answer)
    assert [row.task.id for row in run.rows] == [task.id for task in run.tasks]
    assert {row.id.partition("/")[0] for row in run.rows} == {"eval_after"}
    assert {asked[2:] for asked in run.asked} == {(0, 0.0)}


def test_the_untouched_model_is_asked_tasks_of_each_data_set(evaluated, tmp_path):
    """Data sets that are not generated come one after the other."""
    (tmp_path / "own.jsonl").write_text(
        "".join(f'{{"question": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(40))
    )
    own = ("envs.mix={lookup=0.5, own_integer=0.5}", "evaluation.num_tasks=6", "evaluation.num_untouched_tasks=3")
    run = evaluated(
        lambda task, seed: task.answer, *own, f"envs.data_path={tmp_path}/own.jsonl", phase="eval_untouched"
    )
    assert {task.dataset for task in run.tasks[:3]} == {"lookup"}
    assert Counter(row.task.dataset for row in run.rows) == {"lookup": 2, "own_integer": 1}


def test_a_run_evaluates_after_every_so_many_steps_and_not_after_the_last():
    def steps(*overrides):
        config = load_run_config(None, ["num_steps=6", *overrides])
        return [step for step in range(1, 7) if config.evaluates_after(step)]

    assert steps() == []
    assert steps("evaluation.every_steps=2") == [2, 4]
    assert steps("evaluation.every_steps=1") == [1, 2, 3, 4, 5]


def test_each_data_set_has_its_share_of_what_is_evaluated_while_training():
    config = load_run_config(None, [HELD_OUT, "evaluation.num_tasks=40", "evaluation.while_training_tasks=10"])
    whole, some = evaluation_tasks(config), tasks_while_training(config)
    assert Counter(task.dataset for task in some) == {"lookup": 5, "two_lookup": 3, "branch": 2}
    assert some == [task for task in whole if task in some]
    few = load_run_config(None, [HELD_OUT, "evaluation.num_tasks=20"])
    assert tasks_while_training(few) == evaluation_tasks(few)


def test_curve_has_a_rate_with_its_interval_for_each_family_and_for_all():
    found = held_out_metrics(evaluation("e", {"lookup": ["1", "0", None], "branch": ["1", "1"], "arith": [None]}))
    assert {name: value for name, value in found.items() if "solve_rate" in name} == {
        "held_out/solve_rate": 0.75,
        "held_out/solve_rate/lookup": 0.5,
        "held_out/solve_rate/branch": 1.0,
    }
    assert (found["held_out/tasks"], found["held_out/tasks/lookup"], found["held_out/unscored"]) == (4, 2, 2)
    # Wilson, 2 of 2.
    assert (found["held_out/low/branch"], found["held_out/high/branch"]) == pytest.approx((0.342, 1.0), abs=1e-3)
    # One family is all there is.
    assert not any(name.count("/") > 1 for name in held_out_metrics(evaluation("e", {"lookup": ["1"]})))


@pytest.fixture
def stage(tmp_path):
    """A run in its RL loop, of which version 3 is the newest."""
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


def test_evaluation_while_training_leaves_a_row_its_attempts_and_a_line(stage):
    evaluate_step(stage, 5)
    (row,) = held_out_rows(stage.folder)
    assert (row["step"], row["held_out/solve_rate"], row["held_out/policy_version"]) == (5, 0.5, 3)
    assert (row["held_out/solve_rate/lookup"], row["held_out/solve_rate/branch"]) == (1.0, 0.0)
    attempts = list(read_trajectories(stage.folder.path / "trajectories.jsonl"))
    assert [one.task.id for one in attempts] == [task.id for task in tasks_while_training(stage.config)]
    assert {(one.phase, one.step, one.group_id) for one in attempts} == {("held_out", 5, "held_out-5")}
    assert {asked[3] for asked in stage.solver.asked} == {0.0}
    assert stage.told == ["after step 5: 2 of 4 held-out tasks right"]


def test_run_that_goes_back_to_a_checkpoint_keeps_the_evaluations_up_to_it_and_no_other(stage):
    for step in (1, 2, 3):
        evaluate_step(stage, step)
    stage.folder.rewind(2)
    evaluate_step(stage, 3)
    stage.folder.rewind(3)
    assert [row["step"] for row in held_out_rows(stage.folder)] == [1, 2, 3]
    attempts = Counter(one.step for one in read_trajectories(stage.folder.path / "trajectories.jsonl"))
    assert attempts == {1: 4, 2: 4, 3: 4}


def test_attempts_whose_engine_breaks_while_training_end_nothing_and_are_named(stage):
    stage.solver.answer_of = broken
    evaluate_step(stage, 1)
    (row,) = held_out_rows(stage.folder)
    assert row["held_out/unscored"] == 4
    assert "held_out/solve_rate" not in row
    assert "0 of 0 held-out tasks right; 4 more are unscored, because the engine or a tool failed" in stage.told[0]
