"""Step labels from the task generator's own plan: what the right next step was is known, not judged."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean

from envs.datasets.generated import partial_results, plan_of, result_of
from envs.types import Task, ToolCall
from reward.labels import LabelError, StepLabel
from reward.prm.step_text import StepText
from reward.scorers import score_answer
from rollout.filters import SOLVED
from rollout.types import Group, Trajectory, Turn

RIGHT, UNSUPPORTED, PART, HARMLESS, REPEATED, WRONG = 1.0, 0.7, 0.2, 0.2, 0.1, 0.0
"""PART is low: a planner that computes a part of the result after the first of two searches stops there, and of 28
recorded prefixes with such a step none was ever continued to the right answer."""


class PlanLabeller:
    """A `Labeller` for generated tasks: 1.0 a right next step, 0.7 a right answer without support, 0.2 a part of
    a computation or a thought, 0.1 a step done before, 0.0 a wrong or malformed one.

    The tools of generated tasks are deterministic, so a label by what a decision brought is a label of the
    decision: the blind score and the hindsight score are the same.
    """

    name = "plan"

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self._trajectories = {trajectory.id: trajectory for trajectory in trajectories}
        self._scores: dict[str, list[float]] = {}

    async def label(self, step: StepText) -> StepLabel:
        """Raises LabelError for a task that was not generated."""
        if step.trajectory_id not in self._scores:
            self._scores[step.trajectory_id] = plan_scores(self._trajectories[step.trajectory_id])
        score = self._scores[step.trajectory_id][step.step]
        return StepLabel.of(step, labeller=self.name, score=score, score_hindsight=score, votes=(score,))


def plan_scores(trajectory: Trajectory) -> list[float]:
    """The score of every planner turn of a generated task. Raises LabelError for another task, or another agent."""
    if any(turn.heard is not None for turn in trajectory.planner_turns):
        raise LabelError(f"{trajectory.id} is of an agent of one's own, and a plan knows the planner's steps only")
    try:
        progress = _Progress.of(trajectory.task)
    except ValueError as error:
        raise LabelError(str(error)) from error
    return [progress.score(turn) for turn in trajectory.planner_turns]


@lru_cache(maxsize=1)
def _worked_out(task: Task) -> tuple[frozenset[str], tuple[int, ...], frozenset[int]]:
    """What the plan looks up, what its code computes, and the parts of that. Siblings come one after the other."""
    names: dict[str, int] = {}
    values: list[int] = []
    parts: set[int] = set()
    plan = plan_of(task)
    for step in plan:
        if step.action == "code":
            values.append(result_of(step.action_input, names))
            parts |= partial_results(step.action_input, names)
    items = frozenset(step.action_input for step in plan if step.action == "search")
    return items, tuple(values), frozenset(parts)


@dataclass(slots=True)
class _Progress:
    """How far along its plan an episode is: facts and values still missing, and those it has."""

    task: Task
    items: frozenset[str]
    values: tuple[int, ...]
    parts: frozenset[int]
    found: set[str] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    seen: set[ToolCall] = field(default_factory=set)

    @classmethod
    def of(cls, task: Task) -> "_Progress":
        items, values, parts = _worked_out(task)
        return cls(task=task, items=items, values=values, parts=parts)

    def score(self, turn: Turn) -> float:
        call = turn.tool_call
        if call is None:
            return WRONG
        if call.name == "answer":
            return self._answer(call.arguments)
        if call in self.seen:
            return REPEATED
        result = turn.tool_result
        if result is None or result.error is not None:
            # The same call may be right later: a name that it misses now may be there by then.
            return WRONG
        self.seen.add(call)
        match call.name:
            case "search":
                return self._search(result.text)
            case "code":
                return self._code(result.text)
        return HARMLESS

    def _search(self, result: str) -> float:
        found = {item for item in self.items if f"of {item} weighs" in result}
        if not found:
            return WRONG
        new = found - self.found
        self.found |= found
        return RIGHT if new else REPEATED

    def _code(self, result: str) -> float:
        try:
            value = int(result.strip())
        except ValueError:
            return WRONG
        if value in self.known:
            return REPEATED
        if value in self.values:
            self.known.add(value)
            return RIGHT
        if value in self.parts:
            self.known.add(value)
            return PART
        return WRONG

    def _answer(self, text: str) -> float:
        if score_answer(self.task, text) != SOLVED:
            return WRONG
        return RIGHT if self.values[-1] in self.known else UNSUPPORTED


def fresh_error(groups: Iterable[Group]) -> Mapping[str, float]:
    """How wrong a PRM is on what the policy does now: `prm/rejudge_mse`, the mean squared error of its scores
    against the plan's, over the steps of a batch that have both; nothing where none has."""
    errors = [error for group in groups for error in _errors(group)]
    return {"prm/rejudge_mse": fmean(error**2 for error in errors)} if errors else {}


def _errors(group: Group) -> Iterator[float]:
    """The PRM's scores less the plan's, of trainable turns; none for a task without a plan: only generated ones
    have it, and a mix may hold others."""
    if all(trajectory.prm_digest is None for trajectory in group.trajectories):
        return
    try:
        truths = [plan_scores(trajectory) for trajectory in group.trajectories]
    except LabelError:
        return
    for trajectory, known in zip(group.trajectories, truths, strict=True):
        for turn, truth in zip(trajectory.planner_turns, known, strict=True):
            if turn.score is not None and turn.trainable:
                yield turn.score - truth
