import pytest

from configs.errors import UserError
from envs.types import Task
from reward import collected
from reward.collected import CollectedGroups, outcome_of
from rollout.types import Group, Reward
from tests.changed import replace
from tests.reward.test_step_text import decided, make_trajectory, malformed


def make_group(number, *, answers=("141", "140"), stop_reasons=None):
    task = Task(id=f"lookup-train-0-{number}", dataset="lookup", question="What do 3 crates weigh, 苹果?", answer="141")
    id = f"collect/{task.id}"
    stop_reasons = stop_reasons or ["answered"] * len(answers)
    trajectories = tuple(
        replace(
            make_trajectory(
                decided("code", "3*47", "141"),
                malformed("hm"),
                decided("answer", str(answer)),
                task=task,
                id=f"{id}/{index}",
            ),
            group_id=id,
            answer=answer,
            stop_reason=stop_reason,
        )
        for index, (answer, stop_reason) in enumerate(zip(answers, stop_reasons, strict=True))
    )
    return Group(id=id, trajectories=trajectories)


def written(trajectory):
    outcome = outcome_of(trajectory)
    return replace(trajectory, phase="collect", reward=Reward(outcome=outcome, total=outcome))


def shards(folder):
    return {path.name: path.read_text().count("\n") for path in sorted(folder.iterdir())}


def ids_of(store):
    return [one.id for one in store.trajectories()]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "collected"


def test_groups_are_read_as_written(folder):
    groups = [make_group(0), make_group(1, answers=("141", None), stop_reasons=("answered", "format"))]
    store = CollectedGroups(folder)
    for group in groups:
        store.add(group)
    assert list(store.trajectories()) == [one for group in groups for one in group.trajectories]


def test_a_known_group_is_not_added_again(folder):
    store = CollectedGroups(folder)
    store.add(make_group(0))
    store.add(make_group(0, answers=("1", "2", "3")))
    CollectedGroups(folder).add(make_group(0, answers=("4",)))
    assert list(store.trajectories()) == [written(one) for one in make_group(0).trajectories]


@pytest.mark.parametrize("lost_bytes", [1, 2, 300])
def test_a_truncated_last_group_can_be_added_again(folder, lost_bytes):
    store = CollectedGroups(folder)
    store.add(make_group(0))
    store.add(make_group(1))
    shard = folder / "shard-00000.jsonl"
    shard.write_bytes(shard.read_bytes()[:-lost_bytes])
    again = CollectedGroups(folder)
    assert again.group_ids == {"collect/lookup-train-0-0"}
    assert list(again.trajectories()) == [written(one) for one in make_group(0).trajectories]
    again.add(make_group(1))
    assert CollectedGroups(folder).group_ids == store.group_ids
    assert list(again.trajectories()) == list(store.trajectories())


def test_a_truncated_group_is_not_read(folder):
    CollectedGroups(folder).add(make_group(0))
    shard = folder / "shard-00000.jsonl"
    content = shard.read_bytes()
    inside_a_character = content.index("苹".encode()) + 1
    for end in (*range(0, len(content), 50), inside_a_character):
        shard.write_bytes(content[:end])
        assert CollectedGroups(folder).group_ids == set(), end


def test_a_group_without_any_outcome_is_left_out_and_can_be_collected_later(folder):
    store = CollectedGroups(folder)
    store.add(make_group(0, answers=(None, None), stop_reasons=("infrastructure",) * 2))
    assert (store.group_ids, shards(folder)) == (set(), {})
    store.add(make_group(0))
    assert list(store.trajectories()) == [written(one) for one in make_group(0).trajectories]


def test_shards_roll_over_and_keep_their_order_across_processes(folder, monkeypatch):
    monkeypatch.setattr(collected, "GROUPS_PER_SHARD", 2)
    for number in range(5):
        CollectedGroups(folder).add(make_group(number, answers=("141",)))
    assert shards(folder) == {"shard-00000.jsonl": 2, "shard-00001.jsonl": 2, "shard-00002.jsonl": 1}
    assert ids_of(CollectedGroups(folder)) == [f"collect/lookup-train-0-{number}/0" for number in range(5)]


def test_groups_of_another_schema_are_refused(folder):
    CollectedGroups(folder).add(make_group(0))
    shard = folder / "shard-00000.jsonl"
    shard.write_text(shard.read_text().replace('"schema":4', '"schema":3', 1))
    with pytest.raises(UserError, match=r"shard-00000\.jsonl"):
        CollectedGroups(folder)


def test_every_trajectory_is_written_with_its_outcome(folder):
    CollectedGroups(folder).add(
        make_group(0, answers=("141", "140", None), stop_reasons=("answered", "answered", "infrastructure"))
    )
    assert [one.outcome for one in CollectedGroups(folder).trajectories()] == [1.0, 0.0, None]


def test_infrastructure_failure_has_no_outcome():
    assert outcome_of(make_trajectory(answer=None, stop_reason="infrastructure")) is None
    assert outcome_of(make_trajectory(answer=None, stop_reason="context")) == 0.0
