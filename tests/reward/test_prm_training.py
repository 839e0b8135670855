import pytest

from configs.errors import UserError
from envs.types import Task
from reward.labels import StepLabel
from reward.prm.step_text import step_texts
from reward.prm.training import held_out_tasks, prm_data
from tests.changed import replace
from tests.reward.test_step_text import EPISODE, TASK


def of_task(number):
    task = Task(id=f"t{number}", dataset="lookup", question=f"{TASK.question} ({number})", answer="141")
    return replace(EPISODE, id=f"g{number}/0", group_id=f"g{number}", task=task)


def labels_of(trajectory, **changes):
    return [
        StepLabel(
            trajectory_id=step.trajectory_id,
            task_id=step.task_id,
            step=step.step,
            labeller="scripted",
            text_digest=step.digest,
            score=0.5,
            **changes,
        )
        for step in step_texts(trajectory)
    ]


def tasks_of(steps):
    return {one.step.task_id for one in steps}


def test_no_task_is_both_trained_on_and_held_out():
    trajectories = [of_task(number) for number in range(12)]
    data = prm_data(trajectories, [label for one in trajectories for label in labels_of(one)], held_out_share=0.25)
    assert len(tasks_of(data.held_out)) == 3
    assert tasks_of(data.train) | tasks_of(data.held_out) == {f"t{number}" for number in range(12)}
    assert not tasks_of(data.train) & tasks_of(data.held_out)


def test_every_planner_decision_is_data_answers_and_malformed_ones_too():
    trajectories = [of_task(0), of_task(1)]
    data = prm_data(trajectories, [label for one in trajectories for label in labels_of(one)], held_out_share=0.5)
    assert [one.step.valid for one in data.train] == [True, False, True, True]
    assert "Action: answer" in data.train[-1].step.decision


def test_the_same_tasks_are_held_out_whatever_their_order():
    ids = [f"t{number}" for number in range(20)]
    assert held_out_tasks(ids, share=0.2) == held_out_tasks(reversed(ids), share=0.2)
    assert len(held_out_tasks(ids, share=0.2)) == 4
    assert len(held_out_tasks(ids, share=0.001)) == 1


def test_step_without_a_label_is_left_out():
    trajectories = [of_task(0), of_task(1)]
    some = [label for one in trajectories for label in labels_of(one) if label.step != 2]
    data = prm_data(trajectories, some, held_out_share=0.5)
    assert [one.step.step for one in data.train] == [0, 1, 3]


def test_label_of_another_text_is_refused():
    trajectories = [of_task(0), of_task(1)]
    labels = [replace(label, text_digest="0" * 64) for one in trajectories for label in labels_of(one)]
    with pytest.raises(UserError):
        prm_data(trajectories, labels, held_out_share=0.5)


def test_one_task_is_too_few_and_the_error_says_what_to_do():
    with pytest.raises(UserError):
        prm_data([of_task(0)], labels_of(of_task(0)), held_out_share=0.5)
