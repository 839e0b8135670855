"""What judging adds: rewards, and the group that carries them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from configs.errors import UserError
from rollout.filters import SOLVED, ending_of
from rollout.store.lifecycle import Ending
from rollout.types import Trajectory, TrajectoryGroup


class PrmDataError(UserError, ValueError):
    """No PRM can be trained on, or measured with, what was collected or labelled; the message says what to do."""


class PrmError(UserError):
    """The PRM gave no usable score. The step stays unscored and may be tried again; it is never a zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The judgement of one trajectory.

    `outcome` is the raw accuracy that filters and reports use, `total` what training uses (with shaping); both are None
    where the trajectory could not be scored, `total` alone where a rule keeps it out of training. `parts` adds up to
    `total`.
    """

    outcome: float | None
    total: float | None
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """What a process reward model said of a group: `raw[i][j]` is its output for planner turn j of trajectory i,
    None where it gave none. `prm_digest` says which weights spoke; it is empty where none could. `waited_s`: seconds
    that the group waited for it."""

    raw: tuple[tuple[float | None, ...], ...]
    prm_digest: str
    waited_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with one reward per trajectory, in the same order. `step_scores` is None where no process reward
    model judged it."""

    group: TrajectoryGroup
    rewards: tuple[Reward, ...]
    step_scores: StepScores | None = None

    @property
    def outcomes(self) -> list[float | None]:
        return [reward.outcome for reward in self.rewards]

    @property
    def ending(self) -> Ending | None:
        """Whether the group has signal, or why not; None where too few of its trajectories could be scored."""
        return ending_of(self.outcomes, [reward.total for reward in self.rewards])

    @property
    def solved(self) -> list[Trajectory]:
        return [one for one, outcome in zip(self.group.trajectories, self.outcomes, strict=True) if outcome == SOLVED]
