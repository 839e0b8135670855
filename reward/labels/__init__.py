"""Labels of steps: their type, their file, and their estimate by continuations (Monte Carlo)."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from configs.errors import UserError
from reward.prm.step_text import StepText
from reward.scorers import outcomes_of
from rollout.files import append_record, read_records
from rollout.types import Trajectory


class LabelError(RuntimeError):
    """A step that a labeller could not label. It stays unlabelled: no score is made up."""


class VotesDisagreeError(LabelError):
    """A step about which the votes of a judge disagree. The judge works, so it is no sign that other steps fail."""


class StepLabel(msgspec.Struct, kw_only=True, frozen=True):
    """The judgement of one step."""

    trajectory_id: str
    task_id: str
    step: int
    """Number of the planner turn, from 0."""
    labeller: str
    text_digest: str
    """Digest of the StepText that was judged."""
    score: float
    """In [0, 1]."""
    votes: tuple[float, ...] = ()
    """Single verdicts behind `score`."""
    details: dict[str, object] = {}

    @classmethod
    def of(cls, step: StepText, **facts: Any) -> "StepLabel":
        """Return the label of a step, bound to the text that was judged."""
        return cls(
            trajectory_id=step.trajectory_id, task_id=step.task_id, step=step.step, text_digest=step.digest, **facts
        )


class Labeller(Protocol):
    """Anything that labels steps."""

    name: str

    async def label(self, step: StepText) -> StepLabel: ...


def append_label(path: Path, label: StepLabel) -> None:
    append_record(path, msgspec.to_builtins(label))


def read_labels(path: Path) -> Iterator[StepLabel]:
    """Yield the labels of a file without a last line that a crash cut off. Raise UserError for another file."""
    for row in read_records(path) if path.exists() else ():
        try:
            yield msgspec.convert(row, StepLabel)
        except msgspec.ValidationError as error:
            raise UserError(f"{path} holds no labels of this version ({error}); label again into a new file") from None


ContinueFrom = Callable[[Trajectory, int, int], Awaitable[Sequence[Trajectory]]]
"""`continue_from(trajectory, num_turns, count)` samples `count` new continuations after the first `num_turns` planner
turns, and leaves out those whose replay differs from the record."""


class MonteCarloLabeller:
    """A labeller that samples K continuations after the step; the score is the share that ends right.

    This is Math-Shepherd's soft label (arXiv 2312.08935, eq. 2). A last step is labelled with its trajectory's outcome.
    `details` has the number of tokens that were sampled for the label.
    """

    name = "monte_carlo"

    def __init__(self, trajectories: Iterable[Trajectory], continue_from: ContinueFrom, *, continuations: int) -> None:
        self._trajectories = {trajectory.id: trajectory for trajectory in trajectories}
        self._continue_from = continue_from
        self._continuations = continuations

    async def label(self, step: StepText) -> StepLabel:
        """Judge one step. Raise LabelError if there is no continuation, or if one has no score."""
        trajectory = self._trajectories[step.trajectory_id]
        ends: Sequence[Trajectory] = (trajectory,)
        num_tokens = 0
        if step.step < step.num_steps - 1:
            ends = await self._continue_from(trajectory, step.step + 1, self._continuations)
            repeated = sum(turn.num_tokens for turn in trajectory.planner_turns[: step.step + 1])
            num_tokens = sum(end.num_sampled_tokens - repeated for end in ends)
        votes = tuple(outcome for outcome in await outcomes_of(ends) if outcome is not None)
        if not ends or len(votes) < len(ends):
            raise LabelError(
                f"{len(votes)} of {len(ends)} continuations of {trajectory.id} after its first {step.step + 1} turns "
                "have a score; label it again"
            )
        score, details = sum(votes) / len(votes), {"num_tokens": num_tokens}
        return StepLabel.of(step, labeller=self.name, score=score, votes=votes, details=details)
