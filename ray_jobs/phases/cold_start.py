"""The cold start: the policy imitates scripted demonstrations before RL."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from envs.datasets.sampler import demonstration_tasks
from ray_jobs.run.run import Run
from reward.scorers import score_answer
from rollout.types import Trajectory


def cold_start(run: Run) -> Mapping[str, Any]:
    """Supervised steps on scripted demonstrations, some wrong on purpose; then version 0 is published."""
    facts = run.finished("cold_start")
    if facts is None:
        facts = _imitate(run)
    with run.console.waiting("every rollout worker to take up the cold-started policy"):
        load_cold_start(run)
        run.actors.publish_anew()
        run.actors.sync_weights()
    return facts


def load_cold_start(run: Run) -> None:
    """The cold-started policy into the learner, ready for RL."""
    (checkpoint,) = run.folder.cold_start.glob("v*")
    run.actors.ask_learner("load_checkpoint", checkpoint)
    run.actors.ask_learner("begin_reinforcement")


def _imitate(run: Run) -> Mapping[str, Any]:
    settings = run.config.cold_start
    tasks = (
        demonstration_tasks(run.config.envs.mix, count=settings.num_demonstrations, seed=run.config.seed)
        if settings.num_demonstrations
        else []
    )
    with run.phase("cold_start", total=-(-len(tasks) // settings.batch_demonstrations)) as phase:
        demonstrations = _play(run, tasks)
        run.actors.ask_learner("begin_imitation")
        batches = _cut(demonstrations, settings.batch_demonstrations)
        for step, batch in enumerate(batches):
            # Falling to zero: with a constant step size the policy would lean to whatever the last batches showed.
            rate = settings.learning_rate * (1 - step / len(batches))
            result = run.actors.ask_learner("imitate_step", batch, rate)
            run.log_metrics(step, result.metrics)
            phase.progress.advance(loss=result.metrics["cold_start/loss"])
        run.actors.ask_learner("save_checkpoint", run.folder.cold_start)
        phase.facts.update(
            num_demonstrations=len(demonstrations),
            num_right=sum(score_answer(one.task, one.answer) == 1.0 for one in demonstrations),
            wrong_share=settings.wrong_share,
        )
    return phase.facts


def _play(run: Run, tasks: Sequence[Any]) -> list[Trajectory]:
    """The demonstrations, shuffled by their tasks' order. Raises when the tools failed in one of them."""
    played = ray.get(run.actors.workers[0].demonstrate.remote(tasks, run.config.cold_start.wrong_share))
    broken = [one.id for one in played if one.stop_reason != "answered"]
    if broken:
        raise RuntimeError(f"{len(broken)} demonstrations did not reach their answer, first {broken[0]}")
    return list(played)


def _cut(items: Sequence[Trajectory], size: int) -> list[Sequence[Trajectory]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
