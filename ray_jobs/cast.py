"""The actors of one run, and the waits on them that notice when one dies."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from actors.buffer import BatchRefs, BufferActor
from actors.learner import LearnerActor
from actors.prm import PrmActor
from actors.rollout_worker import RolloutWorkerActor
from actors.weights import WeightStore
from configs.run import RunConfig
from envs.types import Task
from reward.prm import prm_settings
from rollout.types import Trajectory

NUM_GPUS = {"cpu": 0.0, "cuda": 0.4}
"""Share of a card that engine and learner each claim; a PRM claims a quarter of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    buffer: Any
    weights: Any
    learner: Any
    workers: tuple[Any, ...]
    prm: Any
    """None for a run without a process reward model."""
    prm_judges: bool
    """Whether the recipe's credit asks the process reward model."""

    def next_batch(self, rollouts: Sequence[Any]) -> BatchRefs:
        """The next batch; raises at once when one of the `rollouts` ends with an error first."""
        return get_or_fail(self.buffer.next_batch.remote(), rollouts)

    def load_policy(self, checkpoints: Path) -> None:
        """Publish the newest checkpoint in this folder and wait until every worker samples with it."""
        newest = max(checkpoints.glob("v*"))
        ray.get(self.learner.load_checkpoint.remote(newest))
        self.sync_weights(ray.get(self.learner.publish.remote(self.weights)))

    def evaluate(self, tasks: Sequence[Task], phase: str) -> list[Trajectory]:
        """One greedy trajectory per task, in the order of `tasks`, shared out over the workers."""
        count = len(self.workers)
        shares = ray.get(
            [worker.evaluate.remote(tasks[index::count], phase) for index, worker in enumerate(self.workers)]
        )
        by_task = {trajectory.task.id: trajectory for share in shares for trajectory in share}
        return [by_task[task.id] for task in tasks]

    def close(self) -> None:
        """End engines and sandboxes in order; the cluster's end would only kill them."""
        ray.get([worker.close.remote() for worker in self.workers])

    def sync_weights(self, policy_version: int) -> None:
        """Wait until every worker samples with at least this version."""
        ray.get([worker.sync_weights.remote(policy_version) for worker in self.workers])


def start_cast(config: RunConfig, model_path: Path, prm_base: Path | None) -> Cast:
    """Create the actors; returns when learner and engines are up. They load side by side.

    `prm_base` is the base model of a process reward model, None for a run without one.
    """
    engine_env = _thread_env(config.rollout.engine.num_threads)
    learner_env = _thread_env(config.learner.num_threads)
    buffer = BufferActor.options(name=f"buffer-{os.getpid()}").remote(config)
    weights = WeightStore.options(name=f"weights-{os.getpid()}").remote()
    learner = LearnerActor.options(
        num_cpus=1,
        num_gpus=NUM_GPUS[config.learner.device],
        runtime_env={"env_vars": learner_env},
    ).remote(config, model_path)
    prm = _start_prm(config, prm_base) if prm_base else None
    judge = prm if config.reward.credit != "outcome" else None
    workers = tuple(
        RolloutWorkerActor.options(
            num_cpus=1,
            num_gpus=NUM_GPUS[config.rollout.engine.device],
            runtime_env={"env_vars": engine_env},
        ).remote(config, model_path, index, buffer, weights, judge)
        for index in range(config.rollout.num_workers)
    )
    loading = [learner, *workers, *([prm] if prm else [])]
    ray.get([actor.ready.remote() for actor in loading])
    return Cast(buffer=buffer, weights=weights, learner=learner, workers=workers, prm=prm, prm_judges=judge is not None)


def _start_prm(config: RunConfig, base: Path) -> Any:
    """The PRM actor; trained already where the recipe names a PRM's folder."""
    trained = Path(config.reward.prm_path) if config.reward.prm_path else None
    settings = prm_settings(trained) if trained else config.prm
    prm = PrmActor.options(
        num_cpus=0,
        num_gpus=NUM_GPUS[settings.device] / 4,
        runtime_env={"env_vars": _thread_env(settings.num_threads)},
    ).remote(settings, base, config.seed)
    if trained:
        ray.get(prm.load.remote(trained))
    return prm


def _thread_env(num_threads: int) -> dict[str, str]:
    """Ray would give an actor one thread. Waiting threads must soon sleep: where engine and learner share
    the cores, spinning ones cost both of them most of their speed."""
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "1000"}


def get_or_fail(reference: Any, watched: Sequence[Any]) -> Any:
    """The value of `reference`; raises at once when one of the `watched` calls ends with an error first."""
    pending = list(watched)
    while True:
        done, _ = ray.wait([reference, *pending], num_returns=1)
        if done[0] == reference:
            return ray.get(reference)
        ray.get(done[0])
        pending.remove(done[0])
