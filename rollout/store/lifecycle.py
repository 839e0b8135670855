"""The life of a group: its states, the moves between them, and what is known of it at each.

drawn = trained + refused + filtered + failed + expired + live holds at any time; `rollout.store.ledger` keeps it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal[
    "queued",
    "running",
    "ready",
    "in_batch",
    "trained",
    "refused",
    "all_right",
    "all_wrong",
    "overlong",
    "failed",
    "expired",
]
Lease = tuple[int, int]
"""The ordinal of a group and the number of its attempt."""
Ending = Literal["ready", "all_right", "all_wrong", "overlong"]
"""Of a group whose trajectories could be compared: with signal, or one of the ways to be filtered."""

LIVE: tuple[State, ...] = ("queued", "running", "ready", "in_batch")
"""Each of these holds a place until it is trained or dropped."""

MOVES: Mapping[State, frozenset[State]] = {
    "queued": frozenset({"running"}),
    "running": frozenset({"ready", "all_right", "all_wrong", "overlong", "queued", "failed"}),
    "ready": frozenset({"in_batch", "expired", "queued"}),
    "in_batch": frozenset({"trained", "refused", "ready"}),
    "trained": frozenset({"ready"}),
    "refused": frozenset({"ready"}),
    "all_right": frozenset({"queued"}),
    "all_wrong": frozenset({"queued"}),
    "overlong": frozenset({"queued"}),
    "failed": frozenset(),
    "expired": frozenset(),
}
"""Backwards moves undo what a crash undid: a lost worker's groups are queued again, a batch that the newest
checkpoint does not know is ready again, a synchronous round that was cut off is played again as a whole."""


def group_id(ordinal: int) -> str:
    """What the `ordinal`-th group ever drawn is called wherever it is written down."""
    return f"g{ordinal:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Leave to run one group: the `ordinal`-th ever drawn, of the task with number `task`, for the `attempt`-th time.
    `family`: which family of tasks was chosen for that number; None where nobody chose. `repeats`: the number of the
    earlier task that it asks again."""

    ordinal: int
    task: int
    family: str | None = None
    repeats: int | None = None
    attempt: int

    @property
    def made_of(self) -> int:
        """The number that the task itself is made of."""
        return self.task if self.repeats is None else self.repeats

    @property
    def lease(self) -> Lease:
        return self.ordinal, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What a finished group brought. `ending`: decided once, by its judge; None where too few of its trajectories could
    be scored. `payload`: the scored group as bytes, also where it will not be trained: some of these are kept to be
    looked at. `versions`: sampled planner tokens by policy version. `right` is the sum of the outcomes, `scored` the
    number of trajectories that have one. `facts`: numbers that are added up over groups. `reason` says why, where
    nothing could be scored."""

    ending: Ending | None
    payload: bytes
    versions: Mapping[int, int]
    duration_s: float = 0.0
    right: float = 0.0
    scored: int = 0
    facts: Mapping[str, float]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """The batch of a train step: ordinal and task number of each of its groups. `refused`: why the guard did not take
    the step; None where it was taken."""

    step: int
    groups: tuple[tuple[int, int], ...]
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedGroups:
    """All that a policy was trained on, in the order of steps; `next_task` is the number after the highest task that
    was drawn by then."""

    next_task: int
    steps: tuple[TrainedStep, ...]


NOTHING_TRAINED = TrainedGroups(next_task=0, steps=())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Where all groups ever drawn are. `refused` were in a batch whose step the guard did not take. `all_right`,
    `all_wrong` and `overlong` are the ways to be filtered."""

    drawn: int = 0
    queued: int = 0
    running: int = 0
    ready: int = 0
    in_batch: int = 0
    trained: int = 0
    refused: int = 0
    all_right: int = 0
    all_wrong: int = 0
    overlong: int = 0
    failed: int = 0
    expired: int = 0

    @property
    def filtered(self) -> int:
        return self.all_right + self.all_wrong + self.overlong

    @property
    def outstanding(self) -> int:
        """Live groups: each holds a place until it is trained or dropped."""
        return self.queued + self.running + self.ready + self.in_batch

    @property
    def balanced(self) -> bool:
        ended = self.trained + self.refused + self.filtered + self.failed + self.expired
        return self.drawn == ended + self.outstanding
