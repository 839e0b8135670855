"""Labels of steps: their type, their file, and their estimate by continuations (Monte Carlo)."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from reward.prm.step_text import StepText
from reward.scorers import score_answer
from reward.types import PrmDataError
from rollout.records import append_record, read_records
from rollout.types import Trajectory

SCHEMA = 1


class LabelError(RuntimeError):
    """A step that a labeller could not label. It stays unlabelled: no score is made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLabel:
    """The judgement of one step."""

    trajectory_id: str
    task_id: str
    step: int
    """Number of the planner turn, from 0."""
    labeller: str
    text_digest: str
    """Digest of the StepText that was judged."""
    score: float
    """Blind score in [0, 1]: of the decision alone, which is what the PRM can know."""
    score_hindsight: float | None = None
    """Score of a judgement that also saw the decision's result; None if the labeller makes none."""
    votes: tuple[float, ...] = ()
    """Single verdicts behind `score`."""
    spread: float = 0.0
    """Largest vote minus smallest vote."""
    details: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, step: StepText, *, labeller: str, score: float, **further: Any) -> "StepLabel":
        """Return the label of a step, bound to the text that was judged."""
        return cls(
            trajectory_id=step.trajectory_id,
            task_id=step.task_id,
            step=step.step,
            text_digest=step.digest,
            labeller=labeller,
            score=score,
            **further,
        )


class Labeller(Protocol):
    """Anything that labels steps."""

    name: str

    async def label(self, step: StepText) -> StepLabel:
        """Judge one step. Raise LabelError if there is no honest verdict."""
        ...


def append_label(path: Path, label: StepLabel) -> None:
    """Write a label before the next one is requested, because it may have been paid for."""
    append_record(path, {"schema": SCHEMA, **asdict(label)})


def read_labels(path: Path) -> Iterator[StepLabel]:
    """Yield the labels of a file without a last line that a crash cut off. Raise PrmDataError for another schema."""
    for row in read_records(path) if path.exists() else ():
        if row.pop("schema") != SCHEMA:
            raise PrmDataError(f"{path} holds labels of another schema than {SCHEMA}; label again into a new file")
        yield StepLabel(**{**row, "votes": tuple(row["votes"])})


ContinueFrom = Callable[[Trajectory, int, int], Awaitable[Sequence[Trajectory]]]
"""`continue_from(trajectory, num_turns, count)` samples `count` new continuations after the first `num_turns` planner
turns, and leaves out those whose replay differs from the record."""


class MonteCarloLabeller:
    """A labeller that samples K continuations after the step; the score is the share that ends right.

    This is Math-Shepherd's soft label (arXiv 2312.08935, eq. 2). The step's own result is part of the continuation, so
    the score is both blind and hindsight. A last step is labelled with its trajectory's outcome.
    """

    name = "monte_carlo"

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        continue_from: ContinueFrom,
        *,
        continuations: int,
        policy: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """`policy` identifies the policy that continues; it is recorded in each label."""
        self._trajectories = {trajectory.id: trajectory for trajectory in trajectories}
        self._continue_from = continue_from
        self._continuations = continuations
        self._policy = policy

    async def label(self, step: StepText) -> StepLabel:
        """Judge one step.

        Raises LabelError if tools or engine failed in a continuation, which is not the step's fault, or if no
        continuation repeats the trajectory up to the step.
        """
        trajectory = self._trajectories[step.trajectory_id]
        ends: Sequence[Trajectory] = (trajectory,)
        if step.step < step.num_steps - 1:
            ends = await self._continue_from(trajectory, step.step + 1, self._continuations)
        if not ends:
            raise LabelError(f"no continuation of {trajectory.id} repeats its first {step.step + 1} turns")
        broken = sum(end.stop_reason == "infrastructure" for end in ends)
        if broken:
            raise LabelError(f"{broken} of {len(ends)} continuations of {trajectory.id} failed; label it again")
        scores = [score_answer(end.task, end.answer, end.turns) for end in ends]
        votes = tuple(score for score in scores if score is not None)
        if len(votes) < len(ends):
            raise LabelError(f"{len(ends) - len(votes)} of {len(ends)} continuations of {trajectory.id} have no score")
        # Replayed turns are not trainable; only the new ones identify the policy that continued.
        new_turns = (turn for end in ends for turn in end.planner_turns if turn.trainable)
        versions = sorted({version for turn in new_turns for version in turn.token_versions})
        score = sum(votes) / len(votes)
        return StepLabel.of(
            step,
            labeller=self.name,
            score=score,
            score_hindsight=score,
            votes=votes,
            spread=max(votes) - min(votes),
            details={**self._policy, "continuations": self._continuations, "policy_versions": versions},
        )
