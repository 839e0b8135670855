"""Attempts at evaluation items, and the evaluations within a training run on held-out tasks."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

from envs.datasets.sampler import evaluation_tasks
from envs.types import Task
from ray_jobs.evaluation import Evaluation, Place, evaluation_in, items_of, why_unscored
from ray_jobs.run.summary import POLICIES
from ray_jobs.statistics import wilson_interval
from reward.judge_client import AnswerJudge, has_other_wordings
from reward.scorers import outcomes_of, partial_credit
from rollout.codec import Record, flat_record
from rollout.types import Reward, Trajectory, is_answer

if TYPE_CHECKING:
    from actors.rollout_worker import WorkerPool
    from ray_jobs.run.run import Run
    from rollout.worker import Solver

STEP_PHASE = "held_out"
"""Phase of the attempts between two train steps."""
MAX_ATTEMPTS = 3
"""Attempts at one item whose engine or tools fail, before it stays unscored."""
SHOWN_STEPS = 8

Item = TypeVar("Item")
Wanted = tuple[Task, int, str]
"""A task, the seed of its attempt, and the id of its trajectory."""


async def attempt_all(
    policy: "Solver | WorkerPool",
    wanted: Sequence[Wanted],
    on_result: Callable[[Trajectory, Record], None],
    *,
    phase: str,
    temperature: float = 0.0,
    step: int | None = None,
    judge: AnswerJudge | None = None,
) -> None:
    """Attempt all items, and pass each scored trajectory on with its line for items.jsonl. Raises the first error.

    The judge is asked about answers that an exact scorer may reject although they are right.
    """
    group_id = phase if step is None else f"{phase}-{step}"

    async def attempt(item: Wanted) -> None:
        task, seed, name = item
        for number in range(1, MAX_ATTEMPTS + 1):
            id = name if number == 1 else f"{name}#{number}"
            trajectory = await policy.attempt(task, id, group_id=group_id, temperature=temperature, seed=seed)
            if not (failed := trajectory.stop_reason == "infrastructure"):
                break
        answer = trajectory.answer
        [outcome] = await outcomes_of([trajectory])
        judged, asked = None, False
        if judge is not None and has_other_wordings(task) and outcome == 0.0 and is_answer(answer):
            asked, judged = True, await judge.same(task.question, task.answer, answer)
        trajectory.phase, trajectory.step = phase, step
        trajectory.reward = Reward(outcome=outcome, total=outcome)
        f1 = None if failed else partial_credit(task, answer)
        facts = {"seed": seed, "f1": f1, "judge_asked": asked, "judged": judged}
        on_result(trajectory, flat_record(trajectory) | facts)

    await side_by_side(wanted, attempt, limit=policy.max_open)


def evaluate(run: "Run", phase: str) -> Evaluation:
    """Evaluate the current policy greedily on the held-out tasks, or read the results of a finished phase."""
    if run.finished(phase) is not None:
        return evaluation_in(run.folder.path, phase)
    tasks = evaluation_tasks(run.config)
    if phase == "eval_untouched":
        tasks = _some_of(tasks, run.config.evaluation.num_untouched_tasks)
    with run.phase(phase, total=len(tasks)) as progress:
        evaluation, attempts = _attempt_and_log(run, tasks, phase, progressed=progress.advance)
    if attempts:
        run.console.note(_note(POLICIES[phase], evaluation))
        for line in shown_attempt(attempts[0]):
            run.console.note(line)
    return evaluation


def evaluate_step(run: "Run", step: int) -> None:
    """Evaluate the policy after a train step greedily on some held-out tasks, and log metrics and attempts.

    Called before the step's batch is given up, so that no newer weights appear meanwhile.
    """
    started = time.perf_counter()
    tasks = _some_of(evaluation_tasks(run.config), run.config.evaluation.while_training_tasks)
    with run.console.waiting(f"the evaluation after step {step}"):
        evaluation, _ = _attempt_and_log(run, tasks, STEP_PHASE, step)
    # Discard the readings: this work must not count as rollouts of the next step.
    run.supervisor.readings()
    facts = {"held_out/policy_version": run.rollouts.policy_version, "held_out/wall_s": time.perf_counter() - started}
    run.log_metrics(step, held_out_metrics(evaluation) | facts)
    run.console.note(_note(f"after step {step}", evaluation))


def _attempt_and_log(
    run: "Run", tasks: Sequence[Task], phase: str, step: int | None = None, progressed: Callable[[], None] | None = None
) -> tuple[Evaluation, list[Trajectory]]:
    """Attempt tasks once, and log the trajectories in the order of the tasks."""
    name = phase if step is None else f"{phase}-{step}"
    wanted = [(task, 0, f"{name}/{task.id}") for task in tasks]
    found: dict[Place, tuple[Trajectory, Record]] = {}

    def keep(trajectory: Trajectory, record: Record) -> None:
        found[trajectory.task.dataset, trajectory.task.id] = trajectory, record
        if progressed:
            progressed()

    asyncio.run(attempt_all(run.rollouts, wanted, keep, phase=phase, step=step))
    results = [found[task.dataset, task.id] for task in tasks]
    attempts = [trajectory for trajectory, _ in results]
    run.folder.log_trajectories(attempts)
    return Evaluation(items=items_of(record for _, record in results)), attempts


def held_out_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return solve rates with 95% Wilson intervals and numbers of tasks, where a task was scored.

    Those of several data sets have names that end in the name of the data set; others are of all together.
    """
    solved = evaluation.solved
    names = list(dict.fromkeys(item.dataset for item in evaluation.items))
    metrics = {"held_out/unscored": float(len(evaluation.unscored))}
    for name in ["", *(names if len(names) > 1 else ())]:
        if results := [right for (dataset, _), right in solved.items() if name in ("", dataset)]:
            low, high = wilson_interval(sum(results), len(results))
            values = {"solve_rate": fmean(results), "low": low, "high": high, "tasks": float(len(results))}
            metrics |= {f"held_out/{value}/{name}".rstrip("/"): number for value, number in values.items()}
    return metrics


def _some_of(tasks: Sequence[Task], num: int) -> list[Task]:
    # At most `num` tasks in their order; each data set has its share.
    num = min(num, len(tasks))
    by_dataset = sorted(range(len(tasks)), key=lambda place: tasks[place].dataset)
    return [tasks[place] for place in sorted(by_dataset[number * len(tasks) // num] for number in range(num))]


def _note(policy: str, evaluation: Evaluation) -> str:
    solved, unscored = evaluation.solved, evaluation.unscored
    note = f"{policy}: {sum(solved.values()):g} of {len(solved)} held-out tasks right"
    return f"{note}; {len(unscored)} more are unscored, because {why_unscored(evaluation.items)}" if unscored else note


def shown_attempt(attempt: Trajectory) -> Iterator[str]:
    """Yield the lines of an attempt: its question, at most `SHOWN_STEPS` steps, and its answer."""

    def cut(text: str | None) -> str:
        return f"{' '.join((text or 'none').split()):.120}"

    yield f"  {cut(attempt.task.question)}"
    for turn in attempt.planner_turns[:SHOWN_STEPS]:
        if turn.format_error:
            yield f"    malformed: {cut(turn.format_error)}"
        elif turn.tool_call and turn.tool_result and turn.tool_call.name != "answer":
            yield f"    {turn.tool_call.name} {cut(turn.tool_call.arguments)} -> {cut(turn.tool_result.text)}"
    score = "unscored" if attempt.outcome is None else f"score {attempt.outcome:g}"
    yield f"    answer {cut(attempt.answer)} ({score})"


async def side_by_side(items: Iterable[Item], work: Callable[[Item], Awaitable[None]], *, limit: int) -> None:
    """Work on at most `limit` items at a time.

    After an error no item is started, the open ones finish, and the first error is raised.
    """
    remaining, failures = iter(items), list[Exception]()

    async def run() -> None:
        for item in remaining:
            if failures:
                return
            try:
                await work(item)
            except Exception as error:
                failures.append(error)

    await asyncio.gather(*(run() for _ in range(limit)))
    if failures:
        raise failures[0]
