"""Attempts at evaluation items, and the evaluations within a training run on held-out tasks."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from configs.run import RunConfig
from envs.datasets.sampler import evaluation_tasks
from envs.types import Task
from ray_jobs.evaluation_folder import Evaluation, Item, evaluation_in, why_unscored
from ray_jobs.run.summary import POLICIES
from ray_jobs.statistics import wilson_interval
from reward.answer_judge import AnswerJudge, has_other_wordings
from reward.scorers import partial_credit, score_answer
from rollout.codec import Record, flat_record
from rollout.types import Reward, Trajectory, is_answer

if TYPE_CHECKING:
    from ray_jobs.run.run import Run

STEP_PHASE = "held_out"
"""Phase of the attempts between two train steps."""


class Attempts(Protocol):
    """A policy that attempts tasks: a `Solver` in this process, or the workers of a run."""

    @property
    def max_open(self) -> int:
        """Attempts that may be open at a time."""
        ...

    async def attempt(
        self, task: Task, trajectory_id: str, *, group_id: str, temperature: float, seed: int
    ) -> Trajectory:
        """Attempt a task. A failed engine or tool ends the trajectory as `infrastructure`."""
        ...


MAX_ATTEMPTS = 3
"""Attempts at one item whose engine or tools fail, before it stays unscored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An item under a seed, with the ids of its trajectory."""

    task: Task
    seed: int
    trajectory_id: str
    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """A policy with the rules by which its attempts are repeated and scored."""

    policy: Attempts
    phase: str
    temperature: float
    max_attempts: int = MAX_ATTEMPTS
    """Attempts before an item whose engine or tools fail stays unscored."""
    judge: AnswerJudge | None = None
    """Asked about answers that an exact scorer may reject although they are right."""
    step: int | None = None
    """The train step of an evaluation while training."""
    log: Callable[[Trajectory], None] | None = None
    """Receives every trajectory with its reward."""

    async def evaluate(self, wanted: Sequence[Wanted], on_result: Callable[[Record], None]) -> None:
        """Attempt all items concurrently and pass each record on. Raises the first error."""
        places = asyncio.Semaphore(self.policy.max_open)

        async def attempt(item: Wanted) -> None:
            async with places:
                on_result(await self._result_of(item))

        try:
            async with asyncio.TaskGroup() as group:
                for item in wanted:
                    group.create_task(attempt(item))
        except BaseExceptionGroup as errors:
            # The first error cancelled the other attempts.
            raise errors.exceptions[0] from None

    async def _result_of(self, wanted: Wanted) -> Record:
        started, task = time.perf_counter(), wanted.task
        for attempt in range(1, self.max_attempts + 1):
            trajectory = await self.policy.attempt(
                task,
                wanted.trajectory_id + (f"#{attempt}" if attempt > 1 else ""),
                group_id=wanted.group_id,
                temperature=self.temperature,
                seed=wanted.seed,
            )
            if trajectory.stop_reason != "infrastructure":
                break
        failed, answer = trajectory.stop_reason == "infrastructure", trajectory.answer
        # A scorer may take seconds, and must not block the other attempts.
        scored = (trajectory.task, answer, trajectory.turns)
        reward = None if failed else await asyncio.to_thread(score_answer, *scored)
        judged = None
        if asked := self.judge is not None and has_other_wordings(task) and reward == 0.0 and is_answer(answer):
            assert self.judge is not None
            assert answer is not None
            judged = await self.judge.same(task.question, task.answer, answer)
        trajectory.phase, trajectory.step = self.phase, self.step
        trajectory.reward = Reward(outcome=reward, total=reward)
        if self.log is not None:
            self.log(trajectory)
        return {
            **flat_record(trajectory),
            "seed": wanted.seed,
            "f1": None if failed else partial_credit(task, answer),
            "judge_asked": asked,
            "judged": judged,
            "attempts": attempt,
            "seconds": round(time.perf_counter() - started, 3),
        }


def evaluate(run: "Run", phase: str) -> Evaluation:
    """Evaluate the current policy greedily on the held-out tasks, or read the results of a finished phase."""
    if run.finished(phase) is not None:
        return evaluation_in(run.folder.path, phase)
    settings = run.config.evaluation
    tasks = evaluation_tasks(run.config)
    if phase == "eval_untouched":
        tasks = _some_of(tasks, settings.num_untouched_tasks)
    with run.phase(phase, total=len(tasks)) as progress:
        evaluator = Evaluator(policy=run.rollouts, phase=phase, temperature=0.0)
        evaluation, attempts = _attempted(evaluator, tasks, name=phase, progressed=progress.advance)
        run.folder.log_trajectories(attempts)
    if tasks:
        run.console.note(_note(POLICIES[phase], evaluation))
    return evaluation


def evaluate_step(run: "Run", step: int) -> None:
    """Evaluate the policy after a train step greedily on `tasks_while_training`, and log metrics and attempts.

    Called after the step's weights are published and before its batch is given up, so that no newer weights appear
    meanwhile. At depth 0 the workers are idle then; at other depths rollouts continue.
    """
    started, policy = time.perf_counter(), run.rollouts
    evaluator = Evaluator(policy=policy, phase=STEP_PHASE, temperature=0.0, step=step)
    tasks = tasks_while_training(run.config)
    with run.console.waiting(f"the evaluation after step {step}"):
        evaluation, attempts = _attempted(evaluator, tasks, name=f"{STEP_PHASE}-{step}")
    # Discard the readings: this work must not count as rollouts of the next step.
    run.supervisor.readings()
    run.folder.log_trajectories(attempts)
    facts = {"held_out/policy_version": policy.policy_version, "held_out/wall_s": time.perf_counter() - started}
    run.log_metrics(step, held_out_metrics(evaluation) | facts)
    run.console.note(_note(f"after step {step}", evaluation))


def tasks_while_training(config: RunConfig) -> list[Task]:
    """Return the tasks that are evaluated after every `evaluation.every_steps` train steps."""
    return _some_of(evaluation_tasks(config), config.evaluation.while_training_tasks)


def held_out_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return solve rates with 95% Wilson intervals and numbers of tasks.

    They are of all data sets together and, if there are several, of each one under names that end in its name. Without
    a scored task there is no rate.
    """
    solved = evaluation.solved
    names = list(dict.fromkeys(item.key.benchmark for item in evaluation.items))
    parts = {"": list(solved.values())}
    if len(names) > 1:
        parts |= {f"/{name}": [right for key, right in solved.items() if key.benchmark == name] for name in names}
    metrics = {"held_out/unscored": float(len(evaluation.unscored))}
    for end, results in parts.items():
        if results:
            low, high = wilson_interval(sum(results), len(results))
            rate = sum(results) / len(results)
            metrics |= {f"held_out/solve_rate{end}": rate, f"held_out/low{end}": low, f"held_out/high{end}": high}
            metrics[f"held_out/tasks{end}"] = float(len(results))
    return metrics


def _some_of(tasks: Sequence[Task], num: int) -> list[Task]:
    # At most `num` tasks in their order; each data set has its share.
    num = min(num, len(tasks))
    by_dataset = sorted(range(len(tasks)), key=lambda place: tasks[place].dataset)
    return [tasks[place] for place in sorted(by_dataset[number * len(tasks) // num] for number in range(num))]


def _attempted(
    evaluator: Evaluator, tasks: Sequence[Task], *, name: str, progressed: Callable[[], None] = lambda: None
) -> tuple[Evaluation, list[Trajectory]]:
    # The results, and the trajectories, in the order of the tasks.
    attempts: list[Trajectory] = []
    wanted = [Wanted(task=task, seed=0, trajectory_id=f"{name}/{task.id}", group_id=name) for task in tasks]
    asyncio.run(replace(evaluator, log=attempts.append).evaluate(wanted, lambda record: progressed()))
    places = {(task.dataset, task.id): place for place, task in enumerate(tasks)}
    attempts.sort(key=lambda attempt: places[attempt.task.dataset, attempt.task.id])
    return Evaluation(items=tuple(Item.of(flat_record(attempt)) for attempt in attempts)), attempts


def _note(policy: str, evaluation: Evaluation) -> str:
    solved, unscored = evaluation.solved, evaluation.unscored
    note = f"{policy}: {sum(solved.values())} of {len(solved)} held-out tasks right"
    return f"{note}; {len(unscored)} more are unscored, because {why_unscored(evaluation.items)}" if unscored else note
