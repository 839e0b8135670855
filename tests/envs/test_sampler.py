from collections import Counter

import pytest

from configs.envs import OwnDatasetConfig
from configs.run import RunConfig
from envs.datasets.custom import CustomSources
from envs.datasets.generated import plan_of
from envs.datasets.rows import question_key
from envs.datasets.sampler import (
    BLOCK,
    DEFAULT_PLANS,
    FixedShares,
    TaskSampler,
    collection_tasks,
    demonstration_tasks,
    held_out_tasks,
    num_plans,
)

MIX = {"lookup": 0.8, "two_lookup": 0.2}


def keys(tasks):
    return {question_key(task.question) for task in tasks}


@pytest.mark.parametrize("mix", [{"game24": 1}, {"game24": 0.2, "lookup": 0.5, "chain": 0.3}])
def test_finite_data_set_is_drawn_in_shuffled_rounds(mix):
    sampler = TaskSampler(mix, seed=1)
    size = len(sampler._finite["game24"])
    drawn = [task.id for task in map(sampler.task, range(10_000)) if task.dataset == "game24"]
    assert len(drawn) > 2 * size
    assert set(drawn[:size]) == set(drawn[size : 2 * size])
    assert len(set(drawn[:size])) == size
    assert drawn[:size] != drawn[size : 2 * size]


def test_every_block_has_the_exact_shares():
    sampler = TaskSampler({"lookup": 0.9, "two_lookup": 0.1}, seed=4)
    for block in (0, 3):
        names = [sampler.task(ordinal).dataset for ordinal in range(block * BLOCK, (block + 1) * BLOCK)]
        assert (names.count("lookup"), names.count("two_lookup")) == (900, 100)


def test_an_ordinal_alone_decides_its_task():
    late, fresh = (TaskSampler({"game24": 1.0, "lookup": 1.0}, seed=2) for _ in range(2))
    ordinals = (10**12 + 7, 5, 4321, 10**12 + 6, 0)
    tasks = {ordinal: late.task(ordinal) for ordinal in ordinals}
    assert {ordinal: fresh.task(ordinal) for ordinal in reversed(ordinals)} == tasks


def test_tasks_of_a_seed_are_stable():
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
    mix = {"lookup": 0.5, "chain": 0.3, "game24": 0.2, "difference": 0.0}
    shares, sampler = FixedShares(mix, seed=3), TaskSampler(mix, seed=3)
    assert shares.names == ("lookup", "chain", "game24")
    for ordinal in range(50):
        assert shares.name(ordinal) == sampler.task(ordinal).dataset


@pytest.mark.parametrize("seed", [0, 7])
def test_rl_demonstrations_a_prm_and_the_evaluation_share_no_question(seed):
    samplers = [TaskSampler(mix, seed=seed) for mix in (MIX, *({family: 1.0} for family in MIX))]
    parts = [
        keys(generated.task for generated in demonstration_tasks(MIX, count=300, seed=seed)),
        keys(collection_tasks(MIX, count=300, seed=seed)),
        keys(held_out_tasks(MIX, count=300, seed=seed + 1_000_000)),
        keys(sampler.task(ordinal) for sampler in samplers for ordinal in range(3000)),
    ]
    assert [*map(len, parts[:3])] == [300] * 3
    assert sum(map(len, parts)) == len(set.union(*parts))


def test_share_below_one_task_per_block_is_refused():
    with pytest.raises(ValueError, match="chain"):
        TaskSampler({"lookup": 1.0, "chain": 0.0001}, seed=0)


def test_demonstrations_need_a_family_with_known_plans():
    assert demonstration_tasks(MIX, count=4, seed=0)[0].plan
    for mix in ({"game24": 1.0}, {"game24": 1.0, "lookup": 0.0}):
        with pytest.raises(ValueError, match=r"envs\.mix"):
            demonstration_tasks(mix, count=4, seed=0)


def test_every_task_of_rl_has_a_plan_that_its_id_gives():
    tasks = [TaskSampler(MIX, seed=0).task(ordinal) for ordinal in range(40)]
    assert all(plan_of(task)[-1].action_input == task.answer for task in tasks)
    assert all(task.answer not in task.question.split() for task in tasks)
    # Half of the questions are for other purposes; their ordinals are drawn again.
    assert len({len(task.id) for task in tasks if task.dataset == "lookup"}) > 2


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"question": "Number {n}?", "answer": {n}, "split": "eval"}}\n' for n in range(20)))
    return CustomSources(datasets=dict.fromkeys("ab", OwnDatasetConfig(source=str(path), scorer="integer")))


@pytest.mark.parametrize("count", [1, 2, 3, 20])
@pytest.mark.parametrize("others", [("lookup",), ("b",), ("lookup", "b")])
def test_number_of_held_out_tasks_is_exact_whatever_the_shares(others, count, rows):
    mix = dict.fromkeys(("a", *others), 1.0)
    assert len(held_out_tasks(mix, count=count, seed=0, custom=rows)) == count


def test_held_out_tasks_are_at_most_those_that_a_data_set_has(rows):
    drawn = held_out_tasks({"lookup": 1.0, "a": 2.0}, count=60, seed=0, custom=rows)
    assert Counter(task.dataset for task in drawn) == {"lookup": 20, "a": 20}


def test_demonstrations_follow_the_tasks_and_the_agent():
    agent = {"agent": {"function": "mine:solve"}}
    for changes, num in (
        ({}, DEFAULT_PLANS),
        ({"cold_start": {"num_demonstrations": 3}}, 3),
        ({"envs": {"mix": {"game24": 1.0}}}, 0),
        (agent, 0),
        (agent | {"cold_start": {"path": "talks.jsonl"}}, 0),
    ):
        assert num_plans(RunConfig.model_validate(changes)) == num
