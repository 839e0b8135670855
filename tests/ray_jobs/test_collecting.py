from configs.reward import CollectConfig
from envs.types import Task
from ray_jobs.prm import CollectedGroups, collect_groups, collection_facts
from rollout.types import Group
from tests.reward.test_step_text import decided, make_trajectory, malformed


def make_tasks(count):
    return [Task(id=f"arith-train-0-{n}", dataset="arith", question=f"{n}*2?", answer=str(2 * n)) for n in range(count)]


class Policy:
    """A policy whose first rollout of every task is right. `faults` maps a task id to a stop reason."""

    def __init__(self, faults=()):
        self.faults = dict(faults)
        self.tasks = []

    async def __call__(self, task, group_id, group_size):
        self.tasks.append(task.id)
        fault = self.faults.get(task.id)
        trajectories = tuple(
            make_trajectory(
                malformed("hm"),
                decided("answer", answer),
                task=task,
                id=f"{group_id}/{index}",
                answer=None if fault else answer,
                stop_reason=fault or "answered",
            )
            for index, answer in enumerate([task.answer, *["-1"] * (group_size - 1)])
        )
        return Group(id=group_id, trajectories=trajectories)


async def collect(folder, tasks, policy, on_group=lambda: None):
    store = CollectedGroups(folder)
    await collect_groups(tasks, store, CollectConfig(rollouts_per_task=2), policy, on_group)
    return store


async def test_every_task_gives_one_group_and_known_groups_are_not_collected_again(tmp_path):
    tasks, finished, policy = make_tasks(6), [], Policy()
    await collect(tmp_path, tasks[:4], Policy())
    store = await collect(tmp_path, tasks, policy, lambda: finished.append(1))
    assert (policy.tasks, len(finished)) == ([task.id for task in tasks[4:]], 6)
    assert sorted(trajectory.id for trajectory in store.trajectories()) == [
        f"collect/arith-train-0-{n}/{index}" for n in range(6) for index in range(2)
    ]


async def test_a_group_that_failed_is_collected_in_the_next_pass(tmp_path):
    tasks, policy = make_tasks(3), Policy()
    store = await collect(tmp_path, tasks, Policy({tasks[1].id: "infrastructure"}))
    assert collection_facts(list(store.trajectories())) == {
        "num_tasks": 2,
        "num_trajectories": 4,
        "num_steps": 8,
        "num_malformed": 4,
        "num_right": 2,
    }
    store = await collect(tmp_path, tasks, policy)
    assert (policy.tasks, len(store.group_ids)) == ([tasks[1].id], 3)
