import pytest

from configs.errors import UserError
from envs.types import Task
from reward.labels import StepLabel
from reward.prm.step_text import step_texts
from reward.prm.training import check_labels, held_out_tasks, prm_data
from tests.changed import replace
from tests.reward.test_step_text import EPISODE, TASK


def of_task(number):
    task = Task(id=f"t{number}", dataset="lookup", question=f"{TASK.question} ({number})", answer="141")
    return replace(EPISODE, id=f"g{number}/0", group_id=f"g{number}", task=task)


def labels_of(trajectory):
    return [StepLabel.of(step, labeller="scripted", score=step.step / 4) for step in step_texts(trajectory)]


def tasks_of(steps):
    return {labelled.step.task_id for labelled in steps}


def test_no_task_is_both_trained_on_and_held_out():
    trajectories = [of_task(number) for number in range(12)]
    data = prm_data(trajectories, [label for trajectory in trajectories for label in labels_of(trajectory)])
    assert len(tasks_of(data.held_out)) == 3
    assert tasks_of(data.train) | tasks_of(data.held_out) == {f"t{number}" for number in range(12)}
    assert not tasks_of(data.train) & tasks_of(data.held_out)


def test_held_out_tasks_do_not_depend_on_the_order():
    ids = [f"t{number}" for number in range(20)]
    assert held_out_tasks(ids, share=0.2) == held_out_tasks(reversed(ids), share=0.2)
    assert len(held_out_tasks(ids, share=0.2)) == 4
    assert len(held_out_tasks(ids, share=0.001)) == 1


def test_equal_texts_of_a_task_are_trained_on_once_with_their_mean_label():
    trajectories = [of_task(number) for number in range(4)]
    again = [replace(one, id=f"{one.id}/again") for one in trajectories]
    labels = [label for one in trajectories for label in labels_of(one)]
    zeros = [replace(label, score=0.0) for one in again for label in labels_of(one)]
    once, twice = prm_data(trajectories, labels), prm_data([*trajectories, *again], [*labels, *zeros])
    assert [one.label for one in twice.train] == [one.label / 2 for one in once.train]
    assert len(twice.held_out) == 2 * len(once.held_out)


def test_step_without_a_label_is_left_out():
    trajectories = [of_task(0), of_task(1)]
    some = [label for trajectory in trajectories for label in labels_of(trajectory) if label.step != 2]
    data = prm_data(trajectories, some)
    assert [labelled.step.step for labelled in data.train] == [0, 1, 3]


def test_label_of_another_text_is_rejected():
    trajectories = [of_task(0), of_task(1)]
    labels = [replace(label, text_digest="0" * 64) for trajectory in trajectories for label in labels_of(trajectory)]
    with pytest.raises(UserError):
        prm_data(trajectories, labels)


def test_labels_that_are_nearly_all_the_same_are_refused_or_named():
    """As Monte Carlo labels are where hardly any attempt ends right."""
    trajectories = [of_task(number) for number in range(101)]
    zeros = [replace(label, score=0.0) for trajectory in trajectories for label in labels_of(trajectory)]
    few, enough = ([*zeros[:-num], *(replace(label, score=0.25) for label in zeros[-num:])] for num in (4, 5))
    assert len(zeros) == 404
    with pytest.raises(UserError, match=r"label\.type"):
        check_labels(trajectories, few)
    assert check_labels(trajectories, enough) == []
    other = replace(of_task(200), task=replace(of_task(200).task, dataset="sums"))
    (warning,) = check_labels([*trajectories, other], [*few, *labels_of(other)])
    assert "lookup" in warning
    assert "sums" not in warning
