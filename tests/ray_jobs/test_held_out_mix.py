from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from evaluating import HESITANT, ScriptedSolver, broken, config_for, right_answer

from configs.loading import ConfigError, load_run_config
from envs.types import Task
from ray_jobs.evaluation.folder import item_of
from ray_jobs.evaluation.held_out import Evaluation, evaluate, evaluation_tasks
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.preflight import PreflightError, check_before_acting
from ray_jobs.run.summary import _by_dataset, _verdict, mean_scores
from rollout.engines.engine import EngineError
from rollout.records import read_records, trajectory_record
from rollout.types import Trajectory

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
    with pytest.raises(ConfigError, match="shares must be >= 0"):
        load_run_config(None, [f"evaluation.mix={mix}"])


def test_unknown_family_in_the_held_out_mix_is_named():
    with pytest.raises(PreflightError, match=r"evaluation.mix names unknown data set 'nonsense'"):
        check_before_acting(load_run_config(None, ["evaluation.mix={nonsense=1}"]), draws_tasks=True)


def result(dataset, index, answer):
    task = Task(id=f"{dataset}-{index}", dataset=dataset, question="?", answer="1")
    stop_reason = "infrastructure" if answer is None else "answered"
    trajectory = Trajectory(id="t", group_id="g", task=task, turns=(), answer=answer, stop_reason=stop_reason)
    reward = None if answer is None else float(answer == "1")
    return item_of(trajectory_record(trajectory, reward=reward, phase="p", step=None))


def evaluation(phase, answers):
    """`answers` maps a data set to what its tasks were answered, None where no attempt could be scored."""
    items = (result(dataset, index, one) for dataset, found in answers.items() for index, one in enumerate(found))
    return Evaluation(phase=phase, items=tuple(items))


def test_mean_scores_are_told_where_a_scorer_gave_something_between():
    def evaluation(*rewards):
        task = Task(id="t", dataset="lookup", question="?", answer="1")
        trajectory = Trajectory(id="t", group_id="g", task=task, turns=(), answer="1", stop_reason="answered")
        records = (trajectory_record(trajectory, reward=reward, phase="e", step=None) for reward in rewards)
        return Evaluation(phase="e", items=tuple(map(item_of, records)))

    assert mean_scores(evaluation(0.0, 1.0), evaluation(1.0, 1.0)) == {}
    assert mean_scores(evaluation(0.0, None), evaluation(0.5, 1.0)) == {"before": 0.0, "after": 0.75}
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
            yield SimpleNamespace(progress=SimpleNamespace(advance=lambda: progress.append(name)))

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
        rows = list(read_records(folder.path / "trajectories.jsonl"))
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
    assert {row["task_id"][-2:]: (row["reward"], row["attempts"]) for row in run.rows} == {
        "-0": (1.0, 1),
        "-1": (1.0, 2),
        "-2": (None, 2),
    }
    assert list(run.found.solved.values()) == [True, True]
    assert [key.task_id[-2:] for key in run.found.unscored] == ["-2"]
    assert "after RL: 2 of 2 held-out tasks right; 1 more are unscored" in run.said
    unscored = f"lookup/{run.found.unscored[0].task_id}/0"
    assert f"unscored, because the engine or a tool failed at every attempt: {unscored}" in run.said


def test_a_run_does_not_blame_the_engine_for_what_a_scorer_cannot_tell(evaluated):
    run = evaluated(lambda task, seed: "who knows" if task.id.endswith("-2") else task.answer, *HESITANT)
    assert [row["attempts"] for row in run.rows] == [1, 1, 1]
    unscored = f"lookup/{run.found.unscored[0].task_id}/0"
    assert f"1 more are unscored, because a scorer of one's own could not tell: {unscored}" in run.said


def test_a_run_whose_engine_always_fails_scores_nothing_as_wrong(evaluated):
    run = evaluated(broken)
    assert (run.found.solved, len(run.found.unscored), len(run.asked)) == ({}, 3, 6)
    assert {row["reward"] for row in run.rows} == {None}


def test_a_run_writes_its_evaluation_in_the_order_of_the_tasks_and_asks_greedily(evaluated):
    first = []

    def answer(task, seed):
        first.append(task.id)
        # The first one asked is tried again and so is the last one done.
        return EngineError("gone") if len(first) == 1 else "no"

    run = evaluated(answer)
    assert [row["task_id"] for row in run.rows] == [task.id for task in run.tasks]
    assert {row["id"].partition("/")[0] for row in run.rows} == {"eval_after"}
    assert {asked[2:] for asked in run.asked} == {(0, 0.0)}
