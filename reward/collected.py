"""Collected trajectories on disk: groups as JSON lines in shards, to label and to train a PRM on."""

from collections.abc import Iterator
from pathlib import Path

from reward.scorers import score_answer
from reward.types import PrmDataError
from rollout.records import append_record, read_records, trajectory_of, trajectory_record
from rollout.types import Trajectory, TrajectoryGroup

SCHEMA = 1
GROUPS_PER_SHARD = 200


class CollectedGroups:
    """A folder of shards. A group is one line: it is there whole, or not at all, whenever the process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.group_ids = {str(row["group_id"]) for row in self._rows()}

    def add(self, group: TrajectoryGroup) -> None:
        """Write a group. One that could not be scored at all is left out, to be collected again."""
        if group.id in self.group_ids or all(one.stop_reason == "infrastructure" for one in group.trajectories):
            return
        shard = self._folder / f"shard-{len(self.group_ids) // GROUPS_PER_SHARD:05d}.jsonl"
        rows = [
            trajectory_record(one, reward=outcome_of(one), phase="collect", step=None) for one in group.trajectories
        ]
        append_record(shard, {"schema": SCHEMA, "group_id": group.id, "trajectories": rows})
        self.group_ids.add(group.id)

    def trajectories(self) -> Iterator[Trajectory]:
        """Every trajectory of every group, in the order of the shards. Raises PrmDataError for another schema."""
        for row in self._rows():
            yield from map(trajectory_of, row["trajectories"])

    def _rows(self) -> Iterator[dict]:
        for shard in sorted(self._folder.glob("shard-*.jsonl")):
            for row in read_records(shard):
                if row["schema"] != SCHEMA:
                    raise PrmDataError(
                        f"{shard} has schema {row['schema']}, this version reads {SCHEMA}; collect again"
                    )
                yield row


def outcome_of(trajectory: Trajectory) -> float | None:
    """The raw score; None where the infrastructure failed, or a scorer of one's own cannot tell."""
    if trajectory.stop_reason == "infrastructure":
        return None
    return score_answer(trajectory.task, trajectory.answer, trajectory.turns)
