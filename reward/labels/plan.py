"""Step labels from the task generator's own plan, in which the right next step is known exactly."""

from collections.abc import Iterable, Sequence

from envs.datasets.generated import partial_results, plan_of
from envs.types import Task, ToolCall
from reward.labels import LabelError, StepLabel
from reward.prm.step_text import StepText
from reward.scorers import score_answer
from rollout.filters import SOLVED
from rollout.types import Trajectory, Turn

RIGHT = 1.0
UNSUPPORTED = 0.7
"""A right answer that the results so far do not support."""
PART = 0.2
"""A part of a computation. It is low because a planner that computes a part of the result after the first of two
searches stops there: of 28 recorded prefixes with such a step none was continued to the right answer."""
HARMLESS = 0.2
"""A thought."""
REPEATED = 0.1
"""A step that brings what is known already."""
WRONG = 0.0


class PlanLabeller:
    """A labeller for generated tasks, which compares each step with the generator's plan.

    The tools of generated tasks are deterministic, so the label of a decision's result is a label of the decision.
    """

    name = "plan"

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self._trajectories = {trajectory.id: trajectory for trajectory in trajectories}

    async def label(self, step: StepText) -> StepLabel:
        """Judge one step. Raise LabelError for a task that was not generated."""
        trajectory = self._trajectories[step.trajectory_id]
        score = plan_scores(trajectory.task, trajectory.planner_turns)[step.step]
        return StepLabel.of(step, labeller=self.name, score=score, votes=(score,))


def plan_scores(task: Task, turns: Sequence[Turn]) -> list[float]:
    """Return the score of every planner turn. Raise LabelError for a task without a plan or a custom agent."""
    if any(turn.heard is not None for turn in turns):
        raise LabelError(f"a custom agent solved {task.id}, and a plan only knows the planner's steps")
    try:
        progress = _Progress(task)
    except ValueError as error:
        raise LabelError(str(error)) from error
    return [progress.score(turn) for turn in turns]


class _Progress:
    """Position of an episode in its plan. Raises ValueError for a task without a plan."""

    def __init__(self, task: Task) -> None:
        self.task = task
        plan = plan_of(task)
        self.items = {step.action_input for step in plan if step.action == "search"}
        (code,) = [step.action_input for step in plan if step.action == "code"]
        self.value = int(task.answer)
        """Value to compute."""
        self.parts = partial_results(code) - {self.value}
        """Intermediate results of this computation."""
        self.known: set[str | int] = set()
        """Items found and values computed."""
        self.seen: set[ToolCall] = set()

    def score(self, turn: Turn) -> float:
        call, result = turn.tool_call, turn.tool_result
        if call is None:
            return WRONG
        if call.name == "answer":
            if score_answer(self.task, call.arguments) != SOLVED:
                return WRONG
            return RIGHT if self.value in self.known else UNSUPPORTED
        if call in self.seen:
            return REPEATED
        if result is None or result.error is not None:
            return WRONG
        self.seen.add(call)
        brought: set[str | int]
        if call.name == "search":
            brought = {item for item in self.items if f"of {item} weighs" in result.text}
        elif call.name == "code":
            brought = {value for value in (self.value, *self.parts) if result.text.strip() == str(value)}
        else:
            return HARMLESS
        if not brought:
            return WRONG
        if brought <= self.known:
            return REPEATED
        self.known |= brought
        return PART if brought <= self.parts else RIGHT
