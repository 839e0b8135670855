import asyncio

import pytest

from configs.reward import CollectConfig
from envs.types import Task
from ray_jobs.phases.collect import MAX_OPEN_GROUPS, collect_groups, collection_facts
from reward.collected import CollectedGroups
from rollout.types import Group
from tests.reward.test_step_text import decided, make_trajectory, malformed

CONFIG = CollectConfig(rollouts_per_task=2)


def make_tasks(count):
    return [Task(id=f"arith-train-0-{n}", dataset="arith", question=f"{n}*2?", answer=str(2 * n)) for n in range(count)]


class Policy:
    """Answers every task, right in the first of its rollouts. `broken` maps a task id to what happens instead."""

    def __init__(self, broken=(), *, pause_s=0.0):
        self.broken = dict(broken)
        self.asked = []
        self.under_way = self.most_under_way = 0
        self._pause_s = pause_s

    async def __call__(self, task, group_id, group_size):
        self.asked.append(task.id)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(self._pause_s)
        self.under_way -= 1
        trouble = self.broken.get(task.id)
        if isinstance(trouble, Exception):
            raise trouble
        answers = [task.answer, *["-1"] * (group_size - 1)]
        trajectories = tuple(
            make_trajectory(
                malformed("hm"),
                decided("answer", answer),
                task=task,
                id=f"{group_id}/{index}",
                answer=None if trouble else answer,
                stop_reason=trouble or "answered",
            )
            for index, answer in enumerate(answers)
        )
        return Group(id=group_id, trajectories=trajectories)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "collected"


async def collect(folder, tasks, policy, on_group=lambda: None):
    store = CollectedGroups(folder)
    await collect_groups(tasks, store, CONFIG, policy, on_group)
    return store


async def test_every_task_gives_one_group_of_the_configured_size(folder):
    store = await collect(folder, make_tasks(5), Policy())
    assert store.group_ids == {f"collect/arith-train-0-{n}" for n in range(5)}
    assert sorted(one.id for one in store.trajectories()) == [
        f"collect/arith-train-0-{n}/{index}" for n in range(5) for index in range(2)
    ]


async def test_what_is_there_is_not_collected_again(folder):
    tasks = make_tasks(6)
    await collect(folder, tasks[:4], Policy())
    policy = Policy()
    store = await collect(folder, tasks, policy)
    assert policy.asked == [task.id for task in tasks[4:]]
    assert len(store.group_ids) == 6


async def test_progress_counts_every_task_collected_or_there_already(folder):
    tasks = make_tasks(6)
    await collect(folder, tasks[:4], Policy())
    done = []
    await collect(folder, tasks, Policy(), lambda: done.append(1))
    assert len(done) == 6


async def test_a_group_that_broke_off_is_tried_again_in_the_next_pass(folder):
    tasks = make_tasks(3)
    store = await collect(folder, tasks, Policy({tasks[1].id: "infrastructure"}))
    assert store.group_ids == {"collect/arith-train-0-0", "collect/arith-train-0-2"}
    policy = Policy()
    store = await collect(folder, tasks, policy)
    assert policy.asked == [tasks[1].id]
    assert len(store.group_ids) == 3


async def test_what_was_done_before_an_error_is_on_disk_and_not_done_again(folder):
    tasks = make_tasks(MAX_OPEN_GROUPS + 10)
    with pytest.raises(RuntimeError, match="the worker died"):
        await collect(folder, tasks, Policy({tasks[-1].id: RuntimeError("the worker died")}))
    policy = Policy()
    store = await collect(folder, tasks, policy)
    assert tasks[-1].id in policy.asked
    assert len(policy.asked) <= MAX_OPEN_GROUPS
    assert len(store.group_ids) == len(tasks)


async def test_groups_are_collected_side_by_side_but_never_too_many(folder):
    policy = Policy(pause_s=0.005)
    await collect(folder, make_tasks(3 * MAX_OPEN_GROUPS), policy)
    assert policy.most_under_way == MAX_OPEN_GROUPS


async def test_a_group_is_on_disk_before_the_last_one_is_done(folder):
    tasks = make_tasks(2)
    seen = []

    async def policy(task, group_id, group_size):
        if task is tasks[1]:
            await asyncio.sleep(0.05)
            seen.append(CollectedGroups(folder).group_ids)
        return await Policy()(task, group_id, group_size)

    await collect(folder, tasks, policy)
    assert seen == [{"collect/arith-train-0-0"}]


async def test_facts_count_what_was_collected(folder):
    tasks = make_tasks(3)
    store = await collect(folder, tasks, Policy({tasks[0].id: "infrastructure"}))
    assert collection_facts(list(store.trajectories())) == {
        "num_tasks": 2,
        "num_trajectories": 4,
        "num_steps": 8,
        "num_malformed": 4,
        "num_right": 2,
    }
