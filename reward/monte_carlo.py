"""Step labels by trying: the share of continuations from a step that end right."""

from collections.abc import Awaitable, Callable, Iterable, Sequence

from reward.labels import LabelError, StepLabel
from reward.scorers import score_answer
from reward.step_text import StepText
from rollout.types import Trajectory

ContinueFrom = Callable[[Trajectory, int, int], Awaitable[Sequence[Trajectory]]]
"""`continue_from(trajectory, num_turns, count)`: `count` new ends of a trajectory after its first `num_turns`
planner turns."""


class MonteCarloLabeller:
    """A `Labeller` that needs no key: K continuations after the step, score = share that is right.

    Math-Shepherd's soft label (arXiv 2312.08935, eq. 2). The step's own result is part of what follows it, so the
    score is both blind and hindsight. A last step is labelled by its trajectory's outcome.
    """

    name = "monte_carlo"

    def __init__(self, trajectories: Iterable[Trajectory], continue_from: ContinueFrom, *, continuations: int) -> None:
        self._trajectories = {trajectory.id: trajectory for trajectory in trajectories}
        self._continue_from = continue_from
        self._continuations = continuations

    async def label(self, step: StepText) -> StepLabel:
        """Raises LabelError when tools or engine broke in a continuation: what broke was not the step."""
        trajectory = self._trajectories[step.trajectory_id]
        ends = await self._ends(trajectory, step)
        broken = sum(end.stop_reason == "infrastructure" for end in ends)
        if broken:
            raise LabelError(f"{broken} of {len(ends)} continuations of {trajectory.id} broke off; label it again")
        votes = tuple(score_answer(end.task, end.answer) for end in ends)
        score = sum(votes) / len(votes)
        spread = max(votes) - min(votes)
        return StepLabel.of(step, labeller=self.name, score=score, score_hindsight=score, votes=votes, spread=spread)

    async def close(self) -> None:
        """Nothing is open."""

    async def _ends(self, trajectory: Trajectory, step: StepText) -> Sequence[Trajectory]:
        if step.step == step.num_steps - 1:
            return (trajectory,)
        return await self._continue_from(trajectory, step.step + 1, self._continuations)
