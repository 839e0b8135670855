"""Steps with their labels and the PRM's scores, and the table of them that a quality report is computed on."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np

from reward.prm_metrics import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """A planner decision with its label and the PRM's raw output. `group_id` is shared by the attempts at one
    task that were sampled together; `outcome` is the trajectory's, None where it was never judged."""

    task_id: str
    group_id: str
    trajectory_id: str
    step: int
    label: float
    score: float
    num_chars: int
    action: str
    outcome: float | None
    valid: bool


class ScoredTable:
    """Held-out steps in the order of task, group, trajectory and step, and where each of these begins and ends."""

    def __init__(self, steps: Sequence[ScoredStep]) -> None:
        self.steps = sorted(steps, key=lambda step: (*_trajectory(step), step.step))
        self.tasks = [step.task_id for step in self.steps]
        self.labels = np.array([step.label for step in self.steps])
        self.groups = _runs(map(_group, self.steps))
        self.trajectories = _runs(map(_trajectory, self.steps))
        self.judged = [run for run in self.trajectories if self.steps[run.start].outcome is not None]
        self.right = np.array([float(self.steps[run.start].outcome == 1) for run in self.judged])
        self.siblings = _runs(_group(self.steps[run.start]) for run in self.judged)

    def sizes(self) -> dict[str, int]:
        return {
            "num_tasks_held_out": len(set(self.tasks)),
            "num_steps": len(self.steps),
            "num_invalid_steps": sum(not step.valid for step in self.steps),
            "num_groups": len(self.groups),
            "num_trajectories": len(self.trajectories),
            "num_trajectories_judged": len(self.judged),
        }

    def tasks_of(self, runs: Iterable[slice]) -> list[str]:
        return [self.tasks[run.start] for run in runs]

    def aggregate(self, pred: Array, how: Callable[[Array], float]) -> Array:
        """One number for each judged trajectory. Rounded, for the mean of equal scores depends on how many."""
        return np.array([round(float(how(pred[run])), 12) for run in self.judged])


def _group(step: ScoredStep) -> tuple[str, str]:
    return step.task_id, step.group_id


def _trajectory(step: ScoredStep) -> tuple[str, str, str]:
    return step.task_id, step.group_id, step.trajectory_id


def _runs(keys: Iterable[Hashable]) -> list[slice]:
    """Where equal neighbours begin and end."""
    edges = accumulate((sum(1 for _ in members) for _, members in groupby(keys)), initial=0)
    return [slice(start, stop) for start, stop in pairwise(edges)]
