import pytest

from envs.datasets.generated import generate
from envs.datasets.sampler import TaskSampler, demonstration_tasks, held_out_tasks

MIX = {"lookup": 0.8, "two_lookup": 0.2}


def test_same_ordinal_is_the_same_task_in_every_process():
    assert [TaskSampler(MIX, seed=3).task(i) for i in range(20)] == [
        TaskSampler(MIX, seed=3).task(i) for i in range(20)
    ]


def test_shares_of_the_mix_are_kept_in_the_long_run():
    sampler = TaskSampler(MIX, seed=0)
    share = sum(sampler.task(i).dataset == "lookup" for i in range(2000)) / 2000
    assert share == pytest.approx(0.8, abs=0.04)


def test_no_held_out_question_can_come_up_in_training():
    held_out = {task.question for task in held_out_tasks(MIX, count=300, seed=1_000_000)}
    sampler = TaskSampler(MIX, seed=0)
    assert len(held_out) == 300
    assert not held_out & {sampler.task(i).question for i in range(3000)}


def test_data_set_of_finite_size_is_gone_through_in_rounds():
    sampler = TaskSampler({"game24": 1.0}, seed=0)
    size = len(sampler._files["game24"])
    first = {sampler.task(i).id for i in range(size)}
    assert len(first) == size
    assert {sampler.task(i).id for i in range(size, 2 * size)} == first


def test_held_out_mix_may_hold_generated_and_listed_data_sets():
    tasks = held_out_tasks({"lookup": 1.0, "game24": 1.0}, count=10, seed=0)
    assert [task.dataset for task in tasks].count("game24") == 5


def test_demonstrations_need_a_family_whose_plans_are_known():
    assert demonstration_tasks(MIX, count=4, seed=0)[0].plan
    with pytest.raises(ValueError, match="needs a generated family"):
        demonstration_tasks({"game24": 1.0}, count=4, seed=0)


@pytest.mark.parametrize("seed", [0, 7, 250_000])
def test_no_demonstrated_task_is_one_that_rl_trains_on(seed):
    demonstrated = {one.task.id for one in demonstration_tasks(MIX, count=300, seed=seed)}
    sampler = TaskSampler(MIX, seed=seed)
    assert len(demonstrated) == 300
    assert not demonstrated & {sampler.task(ordinal).id for ordinal in range(3000)}


def test_task_never_shows_its_reference_answer():
    assert all(
        one.task.answer not in one.task.question.split()
        for one in (generate("lookup", split="train", index=i, seed=0) for i in range(50))
    )
