"""The phases around the RL loop: evaluation and cold start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from configs.run import RunConfig
from envs.datasets.module import OwnSources
from envs.datasets.sampler import demonstration_tasks, held_out_tasks
from envs.types import Task
from ray_jobs.run.run import Run
from reward.collected import outcome_of
from reward.scorers import score_answer
from rollout.records import read_records, trajectory_of, trajectory_record
from rollout.types import Trajectory

EVALUATION_SEED_OFFSET = 1_000_000
_POLICIES = {"eval_untouched": "untouched model", "eval_before": "before RL", "eval_after": "after RL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Greedy results on held-out tasks, in the order of the tasks. Failed trajectories count as wrong."""

    phase: str
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float | None, ...]
    """One for each; 0 where the infrastructure failed, None where a scorer of one's own could not tell."""

    @property
    def right(self) -> list[bool]:
        return [reward == 1.0 for reward in self.rewards]


def evaluation_tasks(config: RunConfig) -> list[Task]:
    """The held-out tasks of a run: another split, and another seed besides."""
    return held_out_tasks(
        config.evaluation_mix,
        count=config.evaluation.num_tasks,
        seed=config.seed + EVALUATION_SEED_OFFSET,
        path=Path(config.envs.data_path) if config.envs.data_path else None,
        own=OwnSources.of(config),
    )


def evaluate(run: Run, phase: str) -> Evaluation:
    if run.finished(phase) is not None:
        return _recorded_evaluation(run, phase)
    tasks = evaluation_tasks(run.config)
    if phase == "eval_untouched":
        tasks = tasks[: run.config.evaluation.num_untouched_tasks]
    with run.phase(phase, total=len(tasks)):
        trajectories = tuple(run.cast.evaluate(tasks, phase))
        rewards = tuple(0.0 if one.stop_reason == "infrastructure" else outcome_of(one) for one in trajectories)
        evaluation = Evaluation(phase=phase, trajectories=trajectories, rewards=rewards)
        run.folder.log_trajectories(
            trajectory_record(trajectory, reward=reward, phase=phase, step=None)
            for trajectory, reward in zip(trajectories, rewards, strict=True)
        )
    if tasks:
        run.console.note(f"{_POLICIES[phase]}: {sum(evaluation.right)} of {len(tasks)} held-out tasks right")
    return evaluation


def cold_start(run: Run) -> Mapping[str, Any]:
    """Supervised steps on scripted demonstrations, some wrong on purpose; then version 0 is published."""
    facts = run.finished("cold_start")
    if facts is None:
        facts = _imitate(run)
    with run.console.waiting("every rollout worker to take up the cold-started policy"):
        load_cold_start(run)
        run.cast.publish_anew()
        run.cast.sync_weights()
    return facts


def load_cold_start(run: Run) -> None:
    """The cold-started policy into the learner, ready for RL."""
    (checkpoint,) = run.folder.cold_start.glob("v*")
    run.cast.ask_learner("load_checkpoint", checkpoint)
    run.cast.ask_learner("begin_reinforcement")


def _recorded_evaluation(run: Run, phase: str) -> Evaluation:
    records = [row for row in read_records(run.folder.path / "trajectories.jsonl") if row["phase"] == phase]
    return Evaluation(
        phase=phase,
        trajectories=tuple(map(trajectory_of, records)),
        rewards=tuple(row["reward"] for row in records),
    )


def _imitate(run: Run) -> Mapping[str, Any]:
    settings = run.config.cold_start
    tasks = (
        demonstration_tasks(run.config.envs.mix, count=settings.num_demonstrations, seed=run.config.seed)
        if settings.num_demonstrations
        else []
    )
    with run.phase("cold_start", total=-(-len(tasks) // settings.batch_demonstrations)) as phase:
        demonstrations = _play(run, tasks)
        run.cast.ask_learner("begin_imitation")
        batches = _cut(demonstrations, settings.batch_demonstrations)
        for step, batch in enumerate(batches):
            # Falling to zero: with a constant step size the policy would lean to whatever the last batches showed.
            rate = settings.learning_rate * (1 - step / len(batches))
            result = run.cast.ask_learner("imitate_step", batch, rate)
            run.log_metrics(step, result.metrics)
            phase.progress.advance(loss=result.metrics["cold_start/loss"])
        run.cast.ask_learner("save_checkpoint", run.folder.cold_start)
        phase.facts.update(
            num_demonstrations=len(demonstrations),
            num_right=sum(score_answer(one.task, one.answer) == 1.0 for one in demonstrations),
            wrong_share=settings.wrong_share,
        )
    return phase.facts


def _play(run: Run, tasks: Sequence[Any]) -> list[Trajectory]:
    """The demonstrations, shuffled by their tasks' order. Raises when the tools failed in one of them."""
    played = ray.get(run.cast.workers[0].demonstrate.remote(tasks, run.config.cold_start.wrong_share))
    broken = [one.id for one in played if one.stop_reason != "answered"]
    if broken:
        raise RuntimeError(f"{len(broken)} demonstrations did not reach their answer, first {broken[0]}")
    return list(played)


def _cut(items: Sequence[Trajectory], size: int) -> list[Sequence[Trajectory]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
