"""Step labels: how good each planner decision was, as a labeller says, in JSON lines that resume."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from reward.step_text import StepText
from rollout.records import append_record, read_records

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
    details: dict[str, Any] = field(default_factory=dict)

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

    async def close(self) -> None:
        """Let go of connections; nothing is asked after this."""
        ...


def append_label(path: Path, label: StepLabel) -> None:
    """A label that was paid for is on disk before the next one is asked for."""
    append_record(path, {"schema": SCHEMA, **asdict(label)})


def read_labels(path: Path) -> Iterator[StepLabel]:
    """The labels of a file; a last line that was cut off by a crash is left out. Raises ValueError for
    another schema."""
    for row in read_records(path) if path.exists() else ():
        if row.pop("schema") != SCHEMA:
            raise ValueError(f"{path} holds labels of another schema than {SCHEMA}; label again into a new file")
        yield StepLabel(**{**row, "votes": tuple(row["votes"])})
