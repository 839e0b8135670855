import pytest

from envs.datasets.generated import generate, plan_of
from envs.datasets.sampler import BLOCK, FixedShares, TaskSampler, demonstration_tasks, held_out_tasks
from envs.datasets.split import question_key

MIX = {"lookup": 0.8, "two_lookup": 0.2}


def key(task):
    return question_key(task.question)


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


@pytest.mark.parametrize("mix", [{"game24": 1, "lookup": 1}, {"game24": 0.2, "lookup": 0.5, "arith": 0.3}])
def test_rounds_of_a_data_set_count_its_own_draws_and_nothing_elses(mix):
    sampler = TaskSampler(mix, seed=1)
    size = len(sampler._files["game24"])
    drawn = [task.id for task in map(sampler.task, range(10_000)) if task.dataset == "game24"]
    assert len(drawn) > 2 * size
    assert set(drawn[:size]) == set(drawn[size : 2 * size])
    assert len(set(drawn[:size])) == size
    assert drawn[:size] != drawn[size : 2 * size]


def test_every_block_holds_the_shares_exactly():
    sampler = TaskSampler({"lookup": 0.9, "two_lookup": 0.1}, seed=4)
    for block in (0, 3):
        names = [sampler.task(ordinal).dataset for ordinal in range(block * BLOCK, (block + 1) * BLOCK)]
        assert (names.count("lookup"), names.count("two_lookup")) == (900, 100)


def test_an_ordinal_alone_decides_its_task():
    mix = {"game24": 1.0, "lookup": 1.0}
    far = 10**12 + 7
    late, fresh = TaskSampler(mix, seed=2), TaskSampler(mix, seed=2)
    for ordinal in (far, 5, 4321, far - 1, 0):
        late.task(ordinal)
    assert late.task(far) == fresh.task(far)
    assert late.task(4321) == fresh.task(4321)


def test_tasks_of_a_seed_are_what_they_always_were():
    """A run that was begun before goes on with the same tasks."""
    sampler = TaskSampler({"lookup": 0.5, "chain": 0.3, "game24": 0.2}, seed=3)
    assert [sampler.task(ordinal).id for ordinal in (0, 1, 2, 3, 6, 999, 1000, 4321)] == [
        "game24-3-7-11-12",
        "lookup-train-3-2000000001",
        "chain-train-3-2",
        "chain-train-3-3",
        "game24-1-1-2-13",
        "lookup-train-3-3000000999",
        "lookup-train-3-2000001000",
        "lookup-train-3-4321",
    ]


def test_shares_name_the_data_set_that_the_sampler_draws_from():
    mix = {"lookup": 0.5, "chain": 0.3, "game24": 0.2, "arith": 0.0}
    shares, sampler = FixedShares(mix, seed=3), TaskSampler(mix, seed=3)
    assert shares.names == ("lookup", "chain", "game24")
    for ordinal in range(50):
        assert shares.name(ordinal) == sampler.task(ordinal).dataset
        assert sampler.task(ordinal, shares.name(ordinal)) == sampler.task(ordinal)


def test_chosen_family_and_ordinal_decide_the_task_whatever_the_share():
    often, seldom = (TaskSampler({"lookup": one, "chain": 1 - one}, seed=4) for one in (0.9, 0.2))
    for family in ("lookup", "chain"):
        assert [often.task(i, family) for i in range(30)] == [seldom.task(i, family) for i in range(30)]
        assert {often.task(i, family).dataset for i in range(30)} == {family}


def test_no_demonstrated_or_held_out_task_can_be_chosen():
    sampler = TaskSampler(MIX, seed=0)
    others = [one.task for one in demonstration_tasks(MIX, count=300, seed=0)]
    others += held_out_tasks(MIX, count=300, seed=1_000_000)
    drawn = {key(sampler.task(ordinal, family)) for family in MIX for ordinal in range(3000)}
    assert not drawn & set(map(key, others))


def test_share_that_would_never_be_met_is_refused():
    with pytest.raises(ValueError, match="the share of 'arith' is less than 1 in 1000 tasks"):
        TaskSampler({"lookup": 1.0, "arith": 0.0001}, seed=0)


def test_held_out_mix_may_hold_generated_and_listed_data_sets():
    tasks = held_out_tasks({"lookup": 1.0, "game24": 1.0}, count=10, seed=0)
    assert [task.dataset for task in tasks].count("game24") == 5


def test_demonstrations_need_a_family_whose_plans_are_known():
    assert demonstration_tasks(MIX, count=4, seed=0)[0].plan
    for mix in ({"game24": 1.0}, {"game24": 1.0, "lookup": 0.0}):
        with pytest.raises(ValueError, match="needs a generated family"):
            demonstration_tasks(mix, count=4, seed=0)


@pytest.mark.parametrize("seed", [0, 7])
def test_no_demonstrated_task_is_one_that_rl_trains_on(seed):
    demonstrated = [one.task for one in demonstration_tasks(MIX, count=300, seed=seed)]
    trained_on = [TaskSampler(MIX, seed=seed).task(ordinal) for ordinal in range(10_000)]
    assert len({task.id for task in demonstrated}) == 300
    assert not {task.id for task in demonstrated} & {task.id for task in trained_on}
    assert not set(map(key, demonstrated)) & set(map(key, trained_on))


def test_every_task_of_rl_has_a_plan_that_its_id_leads_back_to():
    tasks = [TaskSampler(MIX, seed=0).task(ordinal) for ordinal in range(40)]
    assert all(plan_of(task)[-1].action_input == task.answer for task in tasks)
    # Half of the questions are for others: there the ordinal is drawn for again.
    assert len({len(task.id) for task in tasks if task.dataset == "lookup"}) > 2


def test_task_never_shows_its_reference_answer():
    assert all(
        one.task.answer not in one.task.question.split()
        for one in (generate("lookup", split="train", index=i, seed=0) for i in range(50))
    )


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"question": "Number {n}?", "answer": {n}, "split": "eval"}}\n' for n in range(20)))
    return path


@pytest.mark.parametrize("count", [1, 2, 3, 20])
@pytest.mark.parametrize("others", [("lookup",), ("own_integer",), ("own_integer", "own_math")])
def test_as_many_tasks_are_held_out_as_were_asked_for_whatever_the_shares(others, count, rows):
    assert len(held_out_tasks(dict.fromkeys(("own_text", *others), 1.0), count=count, seed=0, path=rows)) == count


def test_too_many_held_out_tasks_are_refused_with_the_most_that_there_are(rows):
    mix = {"lookup": 1.0, "own_text": 2.0}
    with pytest.raises(ValueError, match=r"it has 20; set evaluation.num_tasks=30 or add rows"):
        held_out_tasks(mix, count=50, seed=0, path=rows)
    assert len(held_out_tasks(mix, count=30, seed=0, path=rows)) == 30
