import pytest

from configs.errors import UserError
from envs.types import Task
from ray_jobs.prm import CollectedGroups
from reward.scorers import outcome_of
from rollout.types import Group, Reward
from tests.changed import replace
from tests.reward.test_step_text import decided, make_trajectory, malformed


def make_group(number, *, answers=("141", "140")):
    """Return a group; an attempt without an answer is a failure of the infrastructure."""
    task = Task(id=f"lookup-train-0-{number}", dataset="lookup", question="What do 3 crates weigh, 苹果?", answer="141")
    turns, id = (decided("code", "3*47", "141"), malformed("hm")), f"collect/{task.id}"
    trajectories = []
    for index, answer in enumerate(answers):
        stop_reason = "answered" if answer else "infrastructure"
        trajectory = make_trajectory(*turns, task=task, id=f"{id}/{index}", answer=answer, stop_reason=stop_reason)
        trajectories.append(replace(trajectory, group_id=id))
    return Group(id=id, trajectories=tuple(trajectories))


def written(trajectory):
    outcome = outcome_of(trajectory)
    return replace(trajectory, phase="collect", reward=Reward(outcome=outcome, total=outcome))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "collected"


async def test_groups_are_read_as_written_in_order(folder):
    groups = [make_group(number, answers=("141", "140", None)) for number in range(5)]
    for group in groups:
        await CollectedGroups(folder).add(group)
    trajectories = list(CollectedGroups(folder).trajectories())
    assert trajectories == [trajectory for group in groups for trajectory in group.trajectories]
    assert [trajectory.outcome for trajectory in trajectories[:3]] == [1.0, 0.0, None]


async def test_a_known_group_is_not_added_again(folder):
    store = CollectedGroups(folder)
    await store.add(make_group(0))
    await store.add(make_group(0, answers=("1", "2", "3")))
    await CollectedGroups(folder).add(make_group(0, answers=("4",)))
    assert list(store.trajectories()) == [written(trajectory) for trajectory in make_group(0).trajectories]


@pytest.mark.parametrize("lost_bytes", [1, 2, 300])
async def test_a_truncated_last_group_can_be_added_again(folder, lost_bytes):
    store = CollectedGroups(folder)
    await store.add(make_group(0))
    await store.add(make_group(1))
    file = folder / "groups.jsonl"
    file.write_bytes(file.read_bytes()[:-lost_bytes])
    again = CollectedGroups(folder)
    assert again.group_ids == {"collect/lookup-train-0-0"}
    assert list(again.trajectories()) == [written(trajectory) for trajectory in make_group(0).trajectories]
    await again.add(make_group(1))
    assert CollectedGroups(folder).group_ids == store.group_ids
    assert list(again.trajectories()) == list(store.trajectories())


async def test_groups_of_another_schema_are_rejected(folder):
    await CollectedGroups(folder).add(make_group(0))
    file = folder / "groups.jsonl"
    file.write_text(file.read_text().replace('"schema":4', '"schema":3', 1))
    with pytest.raises(UserError, match=r"groups\.jsonl"):
        CollectedGroups(folder)
