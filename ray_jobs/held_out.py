"""The evaluations in a training run, greedy: the same held-out tasks before and after RL, some of them on the way."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from configs.run import RunConfig
from envs.datasets.sampler import evaluation_tasks
from envs.types import Task
from ray_jobs.attempts import Evaluator, Wanted
from ray_jobs.evaluation_folder import Item, ItemKey, item_of, why_unscored
from ray_jobs.run.folder import TRAJECTORIES
from ray_jobs.run.summary import POLICIES
from ray_jobs.statistics import PairedComparison, compare_paired, wilson_interval
from rollout.codec import flat_record, read_trajectories
from rollout.types import Trajectory

if TYPE_CHECKING:
    from ray_jobs.run.run import Run

STEP_PHASE = "held_out"
"""What the attempts of an evaluation while training stand under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results on held-out tasks, in the order of the tasks."""

    items: tuple[Item, ...]

    @classmethod
    def of(cls, attempts: Iterable[Trajectory]) -> "Evaluation":
        return cls(items=tuple(item_of(flat_record(attempt)) for attempt in attempts))

    @property
    def solved(self) -> dict[ItemKey, bool]:
        """The items that could be scored."""
        return {item.key: item.solved for item in self.items if not item.failed}

    @property
    def unscored(self) -> list[ItemKey]:
        return [item.key for item in self.items if item.failed]

    def paired_with(self, after: "Evaluation", *, dataset: str | None = None) -> list[tuple[bool, bool]]:
        """Whether each policy solved it, of each item that both could score, of one data set or of all."""
        before = self.solved
        return [
            (before[key], solved)
            for key, solved in after.solved.items()
            if key in before and dataset in (None, key.benchmark)
        ]

    def compared_with(self, after: "Evaluation", *, dataset: str | None = None) -> PairedComparison | None:
        """Both policies on the items that both could score; None where there are none."""
        pairs = self.paired_with(after, dataset=dataset)
        return compare_paired([one for one, _ in pairs], [other for _, other in pairs]) if pairs else None


def evaluation_in(folder: Path, phase: str) -> Evaluation:
    """What stands in the folder of a run."""
    logged = read_trajectories(folder / TRAJECTORIES)
    return Evaluation.of(trajectory for trajectory in logged if trajectory.phase == phase)


def evaluate(run: "Run", phase: str) -> Evaluation:
    """Greedy, each task once; or what stands in the run folder where the phase is done."""
    if run.finished(phase) is not None:
        return evaluation_in(run.folder.path, phase)
    settings = run.config.evaluation
    tasks = evaluation_tasks(run.config)
    if phase == "eval_untouched":
        tasks = _some_of(tasks, settings.num_untouched_tasks)
    with run.phase(phase, total=len(tasks)) as progress:
        evaluator = Evaluator(policy=run.rollouts, phase=phase, temperature=0.0, max_attempts=settings.max_attempts)
        found = _attempted(evaluator, tasks, name=phase, progressed=progress.advance)
        run.folder.log_trajectories(found)
    evaluation = Evaluation.of(found)
    if tasks:
        run.console.note(_news(POLICIES[phase], evaluation))
    return evaluation


def tasks_while_training(config: RunConfig) -> list[Task]:
    """What is asked after every `evaluation.every_steps` train steps: some of `evaluation_tasks`."""
    return _some_of(evaluation_tasks(config), config.evaluation.while_training_tasks)


def _some_of(tasks: Sequence[Task], num: int) -> list[Task]:
    """So many of them, all where there are no more, in their order; each data set has its share."""
    num = min(num, len(tasks))
    by_dataset = sorted(range(len(tasks)), key=lambda place: tasks[place].dataset)
    return [tasks[place] for place in sorted(by_dataset[number * len(tasks) // num] for number in range(num))]


def evaluate_step(run: "Run", step: int) -> None:
    """The policy after a train step, greedily, on `tasks_while_training`; its metrics and attempts stand in the run
    folder, as what belongs to this step.

    Called once the step's weights are published, and before its batch is given up: nothing newer is published
    meanwhile, and at depth 0 nobody rolls out. At other depths rollouts go on as they do while the learner computes.
    """
    started, settings, policy = time.perf_counter(), run.config.evaluation, run.rollouts
    evaluator = Evaluator(
        policy=policy, phase=STEP_PHASE, temperature=0.0, max_attempts=settings.max_attempts, step=step
    )
    tasks = tasks_while_training(run.config)
    with run.console.waiting(f"the evaluation after step {step}"):
        found = _attempted(evaluator, tasks, name=f"{STEP_PHASE}-{step}")
    # What the engines computed for it is not counted as rollouts of the next step.
    run.supervisor.readings()
    evaluation = Evaluation.of(found)
    run.folder.log_trajectories(found)
    facts = {"held_out/policy_version": policy.policy_version, "held_out/wall_s": time.perf_counter() - started}
    run.log_metrics(step, held_out_metrics(evaluation) | facts)
    run.console.note(_news(f"after step {step}", evaluation))


def held_out_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Rates with their 95% Wilson intervals and numbers of tasks; where there are several data sets, those of each
    under names that end in its name. What had no scored task has no rate."""
    solved = evaluation.solved
    names = list(dict.fromkeys(item.key.benchmark for item in evaluation.items))
    parts = {"": list(solved.values())}
    if len(names) > 1:
        parts |= {f"/{name}": [right for key, right in solved.items() if key.benchmark == name] for name in names}
    metrics = {"held_out/unscored": float(len(evaluation.unscored))}
    for end, found in parts.items():
        if found:
            low, high = wilson_interval(sum(found), len(found))
            rate = sum(found) / len(found)
            metrics |= {f"held_out/solve_rate{end}": rate, f"held_out/low{end}": low, f"held_out/high{end}": high}
            metrics[f"held_out/tasks{end}"] = float(len(found))
    return metrics


def _attempted(
    evaluator: Evaluator, tasks: Sequence[Task], *, name: str, progressed: Callable[[], None] = lambda: None
) -> list[Trajectory]:
    """Return the attempts at all tasks, in their order. `name` is the beginning of their ids."""
    found: list[Trajectory] = []
    wanted = [Wanted(task=task, seed=0, trajectory_id=f"{name}/{task.id}", group_id=name) for task in tasks]
    asyncio.run(replace(evaluator, log=found.append).evaluate(wanted, lambda _: progressed()))
    places = {(task.dataset, task.id): place for place, task in enumerate(tasks)}
    return sorted(found, key=lambda attempt: places[attempt.task.dataset, attempt.task.id])


def _news(policy: str, evaluation: Evaluation) -> str:
    solved, unscored = evaluation.solved, evaluation.unscored
    said = f"{policy}: {sum(solved.values())} of {len(solved)} held-out tasks right"
    return f"{said}; {len(unscored)} more are unscored, {why_unscored(evaluation.items)}" if unscored else said
