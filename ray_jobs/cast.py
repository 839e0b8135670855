"""The actors of one run: how they are started, where they are placed, and what all of them are asked."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.learner import LearnerActor
from actors.prm import PrmActor
from actors.rollout_worker import RolloutWorkerActor
from actors.store import StoreActor
from configs.run import RunConfig
from envs.types import Task
from learner.learner import Learner
from ray_jobs.run_folder import RunFolder
from reward.prm import prm_settings
from rollout.adapter_store import AdapterMismatchError
from rollout.types import Trajectory
from rollout.worker import Worker

NUM_GPUS = {"cpu": 0.0, "cuda": 0.4}
"""Share of a card that engine and learner each claim; a PRM claims a quarter of that."""

PLACEMENT_PATIENCE_S = 60.0
SYNC_PATIENCE_S = 300.0

BuildLearner = Callable[[], Learner]
BuildWorker = Callable[[int], Worker]
"""They make the plain objects, in the processes of their actors; a worker by its index."""


class NoRoomError(RuntimeError):
    """The cluster lacks the resources that an actor of the run claims; the message says which."""


class Cast:
    """Store, learner, rollout workers by their index, and the PRM (None for a run without one). Workers and PRM are
    started by whoever wants them."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, *, build_learner: BuildLearner, build_worker: BuildWorker
    ) -> None:
        self._config = config
        self._folder = folder
        self._build_learner = build_learner
        self._build_worker = build_worker
        self._placements: dict[int, PlacementGroup] = {}
        self._by_index: dict[int, Any] = {}
        self.prm: Any = None
        self.store: Any = StoreActor.options(scheduling_strategy=_this_node()).remote(config, folder.path)
        self.learner: Any = self._start_learner()

    @property
    def workers(self) -> tuple[Any, ...]:
        return tuple(self._by_index.values())

    @property
    def prm_judges(self) -> bool:
        """Whether the recipe's credit asks a process reward model that is there."""
        return self.prm is not None and self._config.reward.credit != "outcome"

    @property
    def worker_indices(self) -> tuple[int, ...]:
        return tuple(self._by_index)

    def worker(self, index: int) -> Any:
        return self._by_index[index]

    def start_prm(self, base: Path) -> None:
        """A process reward model over this base: the one that the recipe names, or one that the run will train."""
        trained = Path(self._config.reward.prm_path) if self._config.reward.prm_path else None
        settings = prm_settings(trained) if trained else self._config.prm
        self.prm = PrmActor.options(
            num_cpus=0,
            num_gpus=NUM_GPUS[settings.device] / 4,
            runtime_env={"env_vars": _thread_env(settings.num_threads)},
        ).remote(settings, base, self._config.seed, trained or self._folder.prm)

    def has_room(self) -> bool:
        """Whether the cluster has free what one more worker claims."""
        free = ray.available_resources()
        return all(free.get(name, 0.0) >= amount for name, amount in self._bundle.items())

    def start_worker(self, index: int, *, patience_s: float = PLACEMENT_PATIENCE_S) -> Any:
        """A worker in a placement group of its own: a group cannot grow, and workers come and go. Raises NoRoomError
        when the cluster has no room for it within `patience_s`."""
        bundle = self._bundle
        placement = placement_group([bundle])
        if not placement.wait(patience_s):
            remove_placement_group(placement)
            raise NoRoomError(
                f"no room for rollout worker {index}: it claims {bundle}, of which the cluster has "
                f"{ {name: ray.available_resources().get(name, 0.0) for name in bundle} } free; "
                "lower rollout.num_workers or add a node"
            )
        self._placements[index] = placement
        self._by_index[index] = RolloutWorkerActor.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement),
            runtime_env={"env_vars": _thread_env(self._config.rollout.engine.num_threads)},
        ).remote(
            self._config, index, self.store, self.prm if self.prm_judges else None, partial(self._build_worker, index)
        )
        return self._by_index[index]

    def stop_worker(self, index: int) -> None:
        """End a worker's process and free its place."""
        ray.kill(self._by_index.pop(index))
        remove_placement_group(self._placements.pop(index))

    def restart_learner(self) -> None:
        ray.kill(self.learner)
        self.learner = self._start_learner()

    def wait_until_ready(self) -> None:
        """Returns when every actor is up; they load side by side."""
        loading = [self.learner, *self.workers, *([self.prm] if self.prm else [])]
        ray.get([actor.ready.remote() for actor in loading])

    def newest_version(self) -> int:
        """The version that was published last, -1 where none was."""
        return int(ray.get(self.store.next_version.remote())) - 1

    def publish_anew(self) -> int:
        """Publish the learner's weights under a version number that was never used; returns it."""
        ray.get(self.learner.renumber.remote(ray.get(self.store.next_version.remote())))
        return int(ray.get(self.learner.publish.remote(self.store)))

    def evaluate(self, tasks: Sequence[Task], phase: str) -> list[Trajectory]:
        """One greedy trajectory per task, in the order of `tasks`, shared out over the workers."""
        count = len(self.workers)
        shares = ray.get(
            [worker.evaluate.remote(tasks[index::count], phase) for index, worker in enumerate(self.workers)]
        )
        by_task = {trajectory.task.id: trajectory for share in shares for trajectory in share}
        return [by_task[task.id] for task in tasks]

    def sync_weights(self) -> None:
        """Wait until every worker samples with the version that was published last. Raises AdapterMismatchError when
        one of them does not."""
        newest = self.newest_version()
        try:
            ray.get([worker.sync_weights.remote(newest) for worker in self.workers], timeout=SYNC_PATIENCE_S)
        except ray.exceptions.GetTimeoutError as error:
            raise AdapterMismatchError(
                f"a rollout worker did not take up version {newest} within {SYNC_PATIENCE_S:.0f} s; resume the run"
            ) from error

    def close(self) -> None:
        """End engines and sandboxes in order; the cluster's end would only kill them."""
        ray.get([worker.close.remote() for worker in self.workers])

    @property
    def _bundle(self) -> dict[str, float]:
        bundle = {"CPU": 1.0, "GPU": NUM_GPUS[self._config.rollout.engine.device]}
        return {name: amount for name, amount in bundle.items() if amount}

    def _start_learner(self) -> Any:
        return LearnerActor.options(
            num_cpus=1,
            num_gpus=NUM_GPUS[self._config.learner.device],
            runtime_env={"env_vars": _thread_env(self._config.learner.num_threads)},
        ).remote(self._config, self._build_learner)


def start_cast(config: RunConfig, folder: RunFolder, model_path: Path, prm_base: Path | None) -> Cast:
    """Create the actors; returns when learner and engines are up. `prm_base` is the base model of a process reward
    model, None for a run without one."""
    cast = Cast(
        config,
        folder,
        build_learner=partial(_build_learner, config, model_path),
        build_worker=partial(_build_worker, config, model_path),
    )
    if prm_base:
        cast.start_prm(prm_base)
    for index in range(config.rollout.num_workers):
        cast.start_worker(index)
    cast.wait_until_ready()
    return cast


def _build_learner(config: RunConfig, model_path: Path) -> Learner:
    return Learner(model_path, config.model, config.learner, off_policy=config.pipeline_depth > 0, seed=config.seed)


def _build_worker(config: RunConfig, model_path: Path, index: int) -> Worker:
    return Worker(config, model_path, index=index)


def _this_node() -> NodeAffinitySchedulingStrategy:
    """The store's files are on the driver's disk."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _thread_env(num_threads: int) -> dict[str, str]:
    """Ray would give an actor one thread. Waiting threads must soon sleep: where engine and learner share
    the cores, spinning ones cost both of them most of their speed."""
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "1000"}
