"""Collected trajectories on disk: groups as JSON lines, to label and to train a PRM on."""

from collections.abc import Iterator
from pathlib import Path

from configs.errors import UserError
from reward.scorers import score_answer
from rollout.codec import SchemaError, group_line, group_of
from rollout.files import append_line, whole_lines
from rollout.types import Group, Reward, Trajectory

GROUPS = "groups.jsonl"


class CollectedGroups:
    """A folder with a file of groups. A group is one line: it is there whole or not at all, whenever a process ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / GROUPS
        self.group_ids = {group.id for group in self._groups()}

    def add(self, group: Group) -> None:
        """Write a group. One that could not be scored at all is left out, so that it is collected again."""
        if group.id in self.group_ids or all(one.stop_reason == "infrastructure" for one in group.trajectories):
            return
        for trajectory in group.trajectories:
            outcome = outcome_of(trajectory)
            trajectory.phase, trajectory.reward = "collect", Reward(outcome=outcome, total=outcome)
        append_line(self._path, group_line(group))
        self.group_ids.add(group.id)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield every trajectory, in the order of the file. Raises UserError for another schema."""
        for group in self._groups():
            yield from group.trajectories

    def _groups(self) -> Iterator[Group]:
        for line in whole_lines(self._path) if self._path.exists() else ():
            try:
                yield group_of(line)
            except SchemaError as error:
                raise UserError(f"{self._path}: {error}; collect again") from error


def outcome_of(trajectory: Trajectory) -> float | None:
    """Return the raw score; None where the infrastructure failed, or a custom scorer cannot judge the answer."""
    if trajectory.stop_reason == "infrastructure":
        return None
    return score_answer(trajectory.task, trajectory.answer, trajectory.turns)
