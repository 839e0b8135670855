"""The evaluations inside a training run: the same held-out tasks before and after RL, greedily."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.run import RunConfig
from envs.datasets.module import OwnSources
from envs.datasets.sampler import held_out_tasks
from envs.types import Task
from ray_jobs.evaluation.attempts import Evaluator, Record, Wanted
from ray_jobs.evaluation.folder import Item, ItemKey, item_of, why_unscored
from ray_jobs.run.folder import TRAJECTORIES
from reward.paired import PairedComparison, compare_paired
from rollout.records import read_records

if TYPE_CHECKING:
    from ray_jobs.run.run import Run

EVALUATION_SEED_OFFSET = 1_000_000
_POLICIES = {"eval_untouched": "untouched model", "eval_before": "before RL", "eval_after": "after RL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results on held-out tasks, in the order of the tasks."""

    phase: str
    items: tuple[Item, ...]

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


def evaluation_tasks(config: RunConfig) -> list[Task]:
    """The held-out tasks of a run: another split, and another seed besides."""
    return held_out_tasks(
        config.evaluation_mix,
        count=config.evaluation.num_tasks,
        seed=config.seed + EVALUATION_SEED_OFFSET,
        path=Path(config.envs.data_path) if config.envs.data_path else None,
        own=OwnSources.of(config),
    )


def evaluation_in(folder: Path, phase: str) -> Evaluation:
    """What stands in the folder of a run."""
    records = (row for row in read_records(folder / TRAJECTORIES) if row["phase"] == phase)
    return Evaluation(phase=phase, items=tuple(map(item_of, records)))


def evaluate(run: "Run", phase: str) -> Evaluation:
    """Greedy, each task once; or what stands in the run folder where the phase is done."""
    if run.finished(phase) is not None:
        return evaluation_in(run.folder.path, phase)
    settings = run.config.evaluation
    tasks = evaluation_tasks(run.config)
    if phase == "eval_untouched":
        tasks = tasks[: settings.num_untouched_tasks]
    with run.phase(phase, total=len(tasks)) as record:
        found: list[Record] = []

        def keep(result: Record) -> None:
            found.append(result)
            record.progress.advance()

        evaluator = Evaluator(policy=run.rollouts, phase=phase, temperature=0.0, max_attempts=settings.max_attempts)
        wanted = [Wanted(task=task, seed=0, trajectory_id=f"{phase}/{task.id}", group_id=phase) for task in tasks]
        asyncio.run(evaluator.evaluate(wanted, keep))
        places = {(task.dataset, task.id): place for place, task in enumerate(tasks)}
        found.sort(key=lambda result: places[result["dataset"], result["task_id"]])
        run.folder.log_trajectories(found)
    evaluation = Evaluation(phase=phase, items=tuple(map(item_of, found)))
    if tasks:
        run.console.note(_news(evaluation))
    return evaluation


def _news(evaluation: Evaluation) -> str:
    solved, unscored = evaluation.solved, evaluation.unscored
    said = f"{_POLICIES[evaluation.phase]}: {sum(solved.values())} of {len(solved)} held-out tasks right"
    return f"{said}; {len(unscored)} more are unscored, {why_unscored(evaluation.items)}" if unscored else said
