"""The life of a group, and what passes between the buffer, the workers and the training loop."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any

from msgspec import Struct

from rollout.types import GroupSummary

Ref = Any
"""Reference to an encoded group in the object store; only processes that need the content resolve it."""


class State(StrEnum):
    """The life of a group: from `queued` through `running` to `ready`, `in_batch` and `trained`, or to another end."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    IN_BATCH = "in_batch"
    TRAINED = "trained"
    REFUSED = "refused"
    """The learner's guard refused its batch."""
    ALL_RIGHT = "all_right"
    ALL_WRONG = "all_wrong"
    OVERLONG = "overlong"
    UNSCORED = "unscored"
    FAILED = "failed"
    EXPIRED = "expired"
    """Its tokens became too old; its task was drawn again."""
    LOST = "lost"
    """In flight when the run was cut off or the learner replaced; its task was drawn again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Number of groups in each state, of all that were ever drawn."""

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
    unscored: int = 0
    failed: int = 0
    expired: int = 0
    lost: int = 0

    @property
    def filtered(self) -> int:
        return self.all_right + self.all_wrong + self.overlong + self.unscored

    @property
    def live(self) -> int:
        return self.queued + self.running + self.ready + self.in_batch

    @property
    def balanced(self) -> bool:
        """True if every drawn group is in one state."""
        drawn, *in_states = astuple(self)
        return drawn == sum(in_states)


LIVE = (State.QUEUED, State.RUNNING, State.READY, State.IN_BATCH)
WITH_SIGNAL = (State.READY, State.IN_BATCH, State.TRAINED, State.REFUSED, State.EXPIRED)


def group_id(ordinal: int) -> str:
    """Return the name of the `ordinal`-th group ever drawn."""
    return f"g{ordinal:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """The permission to run one group."""

    lease: int
    """Number of this run of the group."""
    ordinal: int
    """Number of the group."""
    task: int
    """Number of its task, which `TaskSampler.task` takes."""
    num_tries: int

    @property
    def group_id(self) -> str:
        return group_id(self.ordinal)


class GroupRow(Struct, kw_only=True):
    """One line of groups.jsonl: what became of a group."""

    id: str
    task_number: int
    family: str
    state: State
    num_tries: int
    step: int
    duration_s: float
    tokens: int
    versions: tuple[int, int] | None
    """Oldest and newest that sampled its tokens."""
    right: float
    scored: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of one train step by reference, and what happened since the batch before."""

    step: int
    refs: tuple[Ref, ...]
    """In the order in which they were drawn."""
    untrained: tuple[tuple[State, str, Ref], ...] = ()
    """Some other groups that ended without signal, for reading: state, reason, reference."""
    rows: tuple[GroupRow, ...] = ()
    """Of all groups that ended since the batch before, and of this batch."""
    version_ages: Mapping[int, int]
    """Train steps that each version's weights lag behind. Tokens of other versions are too old."""
    facts: Mapping[str, float]
    """`sum_of_facts` of all groups that ended since the batch before."""
    solved: Mapping[str, float]
    """Solve rate of the last tasks of each family."""
    bias: Mapping[str, float]
    counts: GroupCounts
    warning: str | None = None


class Snapshot(Struct, kw_only=True, frozen=True):
    """The state of the buffer after a train step, for the checkpoint. Groups in flight count as lost."""

    next_task: int = 0
    next_ordinal: int = 0
    counts: dict[str, int] = {}
    redraw: tuple[tuple[int, int], ...] = ()
    """Number and tries of the lost groups' tasks."""
    scores: dict[str, list[tuple[int, float, int]]] = {}
    """Of the last groups of each family: number, sum of the outcomes, number of scored trajectories."""
    without_signal: int = 0
    facts: dict[str, float] = {}
    reasons: dict[str, int] = {}


class Totals(Struct, kw_only=True, frozen=True):
    """Numbers over the whole run."""

    counts: GroupCounts
    facts: dict[str, float]
    reasons: dict[str, int]
    """Number of groups that failed, were unscored or expired, by reason."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveGroup:
    """A group in the buffer."""

    ordinal: int
    task: int
    family: str
    num_tries: int
    state: State = State.QUEUED
    worker: int | None = None
    lease: int = -1
    round: int = 0
    ref: Ref = None
    summary: GroupSummary | None = None
    reason: str = ""

    @property
    def age_key(self) -> tuple[int, int]:
        return min(self.summary.versions if self.summary else (), default=0), self.ordinal

    @property
    def num_tokens(self) -> int:
        return sum(self.summary.versions.values()) if self.summary else 0

    def row(self, step: int) -> GroupRow:
        summary = self.summary or GroupSummary(ending=None)
        return GroupRow(
            id=group_id(self.ordinal),
            task_number=self.task,
            family=self.family,
            state=self.state,
            num_tries=self.num_tries,
            step=step,
            duration_s=summary.duration_s,
            tokens=self.num_tokens,
            versions=(min(summary.versions), max(summary.versions)) if summary.versions else None,
            right=summary.right,
            scored=summary.scored,
            reason=self.reason,
        )


def sum_of_facts(groups: Iterable[LiveGroup]) -> dict[str, float]:
    """Return the facts of the groups that ended, added up by name."""
    totals: Counter[str] = Counter()
    for group in groups:
        if group.summary:
            totals.update(group.summary.facts)
    return dict(totals)
