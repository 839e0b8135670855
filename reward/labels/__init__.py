"""Labels of steps: what each is, and their estimate by continuations (Monte Carlo)."""

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
    """A labeller that could not label a step. The step stays unlabelled; no score is ever made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLabel:
    """The judgement of one step, in [0, 1].

    `score` is blind: of the decision alone, which is what the PRM can know. `score_hindsight` also saw the
    result. None where a labeller has no such view. `votes` are the single verdicts behind `score`, `spread`
    their largest minus their smallest. `text_digest` is the StepText's.
    """

    trajectory_id: str
    task_id: str
    step: int
    labeller: str
    text_digest: str
    score: float
    score_hindsight: float | None = None
    votes: tuple[float, ...] = ()
    spread: float = 0.0
    details: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, step: StepText, *, labeller: str, score: float, **further: Any) -> "StepLabel":
        """The label of this step, with the text it was given to."""
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
    name: str

    async def label(self, step: StepText) -> StepLabel:
        """Judge one step. Raises LabelError when there is no honest verdict."""
        ...


def append_label(path: Path, label: StepLabel) -> None:
    """A label that was paid for is on disk before the next one is asked for."""
    append_record(path, {"schema": SCHEMA, **asdict(label)})


def read_labels(path: Path) -> Iterator[StepLabel]:
    """The labels of a file; a last line that was cut off by a crash is left out. Raises PrmDataError
    for another schema."""
    for row in read_records(path) if path.exists() else ():
        if row.pop("schema") != SCHEMA:
            raise PrmDataError(f"{path} holds labels of another schema than {SCHEMA}; label again into a new file")
        yield StepLabel(**{**row, "votes": tuple(row["votes"])})


ContinueFrom = Callable[[Trajectory, int, int], Awaitable[Sequence[Trajectory]]]
"""`continue_from(trajectory, num_turns, count)`: `count` new ends of a trajectory after its first `num_turns`
planner turns, without those that do not repeat them."""


class MonteCarloLabeller:
    """A `Labeller` that needs no key: K continuations after the step, score = share that is right.

    Math-Shepherd's soft label (arXiv 2312.08935, eq. 2). The step's own result is part of what follows it, so the
    score is both blind and hindsight. A last step is labelled by its trajectory's outcome.
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
        """`policy`: who continues, for the labels' details."""
        self._trajectories = {trajectory.id: trajectory for trajectory in trajectories}
        self._continue_from = continue_from
        self._continuations = continuations
        self._policy = policy

    async def label(self, step: StepText) -> StepLabel:
        """Raises LabelError when tools or engine broke in a continuation: what broke was not the step. And when none of
        them repeats the attempt up to the step: they went on from somewhere else."""
        trajectory = self._trajectories[step.trajectory_id]
        ends = await self._ends(trajectory, step)
        if not ends:
            raise LabelError(f"no continuation of {trajectory.id} repeats its first {step.step + 1} turns")
        broken = sum(end.stop_reason == "infrastructure" for end in ends)
        if broken:
            raise LabelError(f"{broken} of {len(ends)} continuations of {trajectory.id} broke off; label it again")
        scores = [score_answer(end.task, end.answer, end.turns) for end in ends]
        votes = tuple(score for score in scores if score is not None)
        if len(votes) < len(ends):
            raise LabelError(f"{len(ends) - len(votes)} of {len(ends)} continuations of {trajectory.id} have no score")
        score = sum(votes) / len(votes)
        spread = max(votes) - min(votes)
        details = {**self._policy, "continuations": self._continuations, "policy_versions": _versions_of(ends)}
        return StepLabel.of(
            step,
            labeller=self.name,
            score=score,
            score_hindsight=score,
            votes=votes,
            spread=spread,
            details=details,
        )

    async def _ends(self, trajectory: Trajectory, step: StepText) -> Sequence[Trajectory]:
        if step.step == step.num_steps - 1:
            return (trajectory,)
        return await self._continue_from(trajectory, step.step + 1, self._continuations)


def _versions_of(ends: Iterable[Trajectory]) -> list[int]:
    """The policy versions that sampled them, without what they repeat."""
    turns = (turn for end in ends for turn in end.planner_turns if turn.trainable)
    return sorted({version for turn in turns for version in turn.token_versions})
