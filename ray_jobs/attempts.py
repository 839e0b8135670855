"""What an evaluation is, wherever it runs: items are tried, tried again while the infrastructure fails, then scored."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from envs.types import Task
from ray_jobs.evaluation_folder import ItemRecord
from reward.answer_judge import AnswerJudge, has_other_wordings
from reward.scorers import partial_credit, score_answer
from rollout.codec import flat_record
from rollout.types import Reward, Trajectory, is_answer


class Attempts(Protocol):
    """A policy that attempts tasks: a `Solver` in this process, or the `RayRollouts` of a run."""

    @property
    def max_open(self) -> int:
        """Attempts that may be open at a time; more of them only wait."""
        ...

    async def attempt(
        self, task: Task, trajectory_id: str, *, group_id: str, temperature: float, seed: int
    ) -> Trajectory:
        """One attempt, with random numbers of its own. A broken engine or tool ends it as `infrastructure`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An item under a seed, and what its trajectory is called."""

    task: Task
    seed: int
    trajectory_id: str
    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """An item whose engine or tools fail at `max_attempts` tries stays unscored: nobody's answer was wrong. `judge` is
    asked where an exact scorer may be too strict. `step` is the train step after which it is asked, while training."""

    policy: Attempts
    phase: str
    temperature: float
    max_attempts: int
    judge: AnswerJudge | None = None
    step: int | None = None
    log: Callable[[Trajectory], None] | None = None
    """Receives every trajectory, with its reward."""

    async def evaluate(self, wanted: Sequence[Wanted], on_result: Callable[[ItemRecord], None]) -> None:
        """Every item, side by side; `on_result` gets each record as soon as it is there. Raises the first error."""
        places = asyncio.Semaphore(self.policy.max_open)

        async def attempt(one: Wanted) -> None:
            async with places:
                on_result(await self.result_of(one))

        try:
            async with asyncio.TaskGroup() as group:
                for one in wanted:
                    group.create_task(attempt(one))
        except BaseExceptionGroup as errors:
            # They were cancelled because of the first one; it says what is wrong.
            raise errors.exceptions[0] from None

    async def result_of(self, wanted: Wanted) -> ItemRecord:
        """Its reward is None for an item that is unscored."""
        started = time.perf_counter()
        for attempt in range(1, self.max_attempts + 1):
            again = f"#{attempt}" if attempt > 1 else ""
            trajectory = await self.policy.attempt(
                wanted.task,
                wanted.trajectory_id + again,
                group_id=wanted.group_id,
                temperature=self.temperature,
                seed=wanted.seed,
            )
            if trajectory.stop_reason != "infrastructure":
                break
        failed = trajectory.stop_reason == "infrastructure"
        scored = (trajectory.task, trajectory.answer, trajectory.turns)
        # In a thread: a scorer may take seconds, and the other attempts go on.
        reward = None if failed else await asyncio.to_thread(score_answer, *scored)
        asked, judged = await self._judged(trajectory, reward)
        trajectory.phase, trajectory.step = self.phase, self.step
        trajectory.reward = Reward(outcome=reward, total=reward)
        if self.log is not None:
            self.log(trajectory)
        return {
            **flat_record(trajectory),
            "seed": wanted.seed,
            "f1": None if failed else partial_credit(wanted.task, trajectory.answer),
            "judge_asked": asked,
            "judged": judged,
            "attempts": attempt,
            "seconds": round(time.perf_counter() - started, 3),
        }

    async def _judged(self, trajectory: Trajectory, reward: float | None) -> tuple[bool, bool | None]:
        task, answer = trajectory.task, trajectory.answer
        if self.judge is None or not has_other_wordings(task) or reward != 0.0 or not is_answer(answer):
            return False, None
        return True, await self.judge.same(task.question, task.answer, answer)
