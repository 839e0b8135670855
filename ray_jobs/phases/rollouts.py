"""What the phases outside of training ask for: one protocol, over this process's engine or a run's workers."""

from collections.abc import Sequence
from typing import Protocol

from envs.types import Task
from rollout.types import Trajectory, TrajectoryGroup


class Attempts(Protocol):
    """A policy that attempts tasks: a `Solver` in this process, or the `RayRollouts` of a run."""

    @property
    def max_open(self) -> int:
        """Attempts that may be open at a time; more of them only wait."""
        ...

    async def attempt(
        self, task: Task, trajectory_id: str, *, group_id: str, temperature: float, seed: int
    ) -> Trajectory:
        """One attempt, with random numbers of its own. A broken engine or tool ends it as `infrastructure`."""
        ...


class Rollouts(Attempts, Protocol):
    """A policy whose trajectories can be labelled and trained on: a `Worker` in this process, or `RayRollouts`."""

    async def collect_group(self, task: Task, group_id: str, group_size: int) -> TrajectoryGroup:
        """Siblings of one task, at `collect.temperature`."""
        ...

    async def continue_from(self, trajectory: Trajectory, num_turns: int, count: int) -> Sequence[Trajectory]:
        """`count` new ends of a trajectory after its first `num_turns` planner turns."""
        ...
