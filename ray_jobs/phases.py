"""The phases around the RL loop: evaluation and cold start."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from configs.run import RunConfig
from envs.datasets.sampler import demonstration_tasks, held_out_tasks
from envs.types import Task
from ray_jobs.cast import Cast
from ray_jobs.console import Console
from ray_jobs.run_folder import RunFolder
from reward.scorers import score_answer
from reward.types import ScoredGroup
from rollout.records import trajectory_record
from rollout.types import Trajectory

EVALUATION_SEED_OFFSET = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Greedy results on held-out tasks, in the order of the tasks. Failed trajectories count as wrong."""

    phase: str
    trajectories: tuple[Trajectory, ...]

    @property
    def right(self) -> list[bool]:
        return [score_answer(one.task, one.answer) == 1.0 for one in self.trajectories]


def evaluation_tasks(config: RunConfig) -> list[Task]:
    """The held-out tasks of a run: another split, and another seed besides."""
    return held_out_tasks(
        config.envs.mix,
        count=config.evaluation.num_tasks,
        seed=config.seed + EVALUATION_SEED_OFFSET,
        path=Path(config.envs.data_path) if config.envs.data_path else None,
    )


def evaluate(cast: Cast, config: RunConfig, console: Console, folder: RunFolder, phase: str) -> Evaluation:
    tasks = evaluation_tasks(config)
    if phase == "eval_untouched":
        tasks = tasks[: config.evaluation.num_untouched_tasks]
    with console.phase(phase, total=len(tasks)):
        trajectories = cast.evaluate(tasks, phase)
    evaluation = Evaluation(phase=phase, trajectories=tuple(trajectories))
    folder.log_trajectories(
        trajectory_record(trajectory, reward=float(right), phase=phase, step=None)
        for trajectory, right in zip(trajectories, evaluation.right, strict=True)
    )
    console.note(f"{phase}: {sum(evaluation.right)} of {len(tasks)} held-out tasks right")
    return evaluation


def cold_start(cast: Cast, config: RunConfig, console: Console, folder: RunFolder) -> dict[str, Any]:
    """Supervised steps on scripted demonstrations, some wrong on purpose; then version 0 is published."""
    settings = config.cold_start
    tasks = (
        demonstration_tasks(config.envs.mix, count=settings.num_demonstrations, seed=config.seed)
        if settings.num_demonstrations
        else []
    )
    num_steps = -(-len(tasks) // settings.batch_demonstrations)
    with console.phase("cold_start", total=num_steps) as progress:
        demonstrations = _play(cast, config, tasks)
        ray.get(cast.learner.reset_optimizer.remote(settings.learning_rate, 0))
        for step, batch in enumerate(_cut(demonstrations, settings.batch_demonstrations)):
            result = ray.get(cast.learner.imitate_step.remote(batch))
            folder.log_metrics(step, result.metrics)
            progress.advance(loss=result.metrics["cold_start/loss"])
        ray.get(cast.learner.reset_optimizer.remote(config.learner.learning_rate, config.learner.warmup_steps))
        version = ray.get(cast.learner.publish.remote(cast.weights))
        cast.sync_weights(version)
    return {
        "num_demonstrations": len(demonstrations),
        "num_right": sum(score_answer(one.task, one.answer) == 1.0 for one in demonstrations),
        "wrong_share": settings.wrong_share,
    }


def _play(cast: Cast, config: RunConfig, tasks: Sequence[Any]) -> list[Trajectory]:
    """The demonstrations, shuffled by their tasks' order. Raises when the tools failed in one of them."""
    played = ray.get(cast.workers[0].demonstrate.remote(tasks, config.cold_start.wrong_share))
    broken = [one.id for one in played if one.stop_reason != "answered"]
    if broken:
        raise RuntimeError(f"{len(broken)} demonstrations did not reach their answer, first {broken[0]}")
    return list(played)


def _cut(items: Sequence[Trajectory], size: int) -> list[Sequence[Trajectory]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def group_records(scored: ScoredGroup, step: int) -> list[dict[str, Any]]:
    """A trained group as records, for reading why a step got its reward."""
    return [
        trajectory_record(trajectory, reward=reward.total, phase="train", step=step)
        for trajectory, reward in zip(scored.group.trajectories, scored.rewards, strict=True)
    ]
