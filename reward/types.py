"""What judging adds: rewards, and the group that carries them."""

from collections.abc import Mapping
from dataclasses import dataclass

from rollout.types import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The judgement of one trajectory.

    `outcome` is the raw accuracy that filters and reports use, `total` what training uses (with shaping);
    both are None where the trajectory could not be scored. `parts` adds up to `total`.
    """

    outcome: float | None
    total: float | None
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with one reward per trajectory, in the same order."""

    group: TrajectoryGroup
    rewards: tuple[Reward, ...]

    @property
    def outcomes(self) -> list[float | None]:
        return [reward.outcome for reward in self.rewards]
