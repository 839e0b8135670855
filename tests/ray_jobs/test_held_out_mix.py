from collections import Counter

import pytest

from configs.loading import ConfigError, load_run_config
from envs.types import Task
from ray_jobs.phases.cold_start import Evaluation, evaluation_tasks
from ray_jobs.run.preflight import PreflightError, check_before_acting
from ray_jobs.run.summary import _by_dataset, mean_scores
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


def answered(dataset, index, answer):
    task = Task(id=f"{dataset}-{index}", dataset=dataset, question="?", answer="1")
    return Trajectory(id="t", group_id="g", task=task, turns=(), answer=answer, stop_reason="answered")


def test_mean_scores_are_told_where_a_scorer_gave_something_between():
    def evaluation(*rewards):
        return Evaluation(phase="e", trajectories=(), rewards=rewards)

    assert mean_scores(evaluation(0.0, 1.0), evaluation(1.0, 1.0)) == {}
    assert mean_scores(evaluation(0.0, None), evaluation(0.5, 1.0)) == {"before": 0.0, "after": 0.75}
    assert evaluation(0.5, 1.0, None).right == [False, True, False]


def test_summary_tells_each_family_apart_and_which_was_never_trained_on():
    places = [("lookup", index) for index in range(8)] + [("branch", index) for index in range(4)]
    right = tuple(float(index < 6) for _, index in places)
    before = Evaluation(
        phase="b", trajectories=tuple(answered(*place, "0") for place in places), rewards=(0.0,) * len(places)
    )
    after = Evaluation(phase="a", trajectories=tuple(answered(*place, "1") for place in places), rewards=right)
    table = _by_dataset(before, after, {"lookup": 1.0})
    assert [(row["num"], row["before"], row["after"], row["trained"]) for row in table.values()] == [
        (8, 0.0, 0.75, True),
        (4, 0.0, 1.0, False),
    ]
    # Six and four of as many in one direction: 2 / 2^6 and 2 / 2^4.
    assert [row["mcnemar_p"] for row in table.values()] == [2 / 64, 2 / 16]
