"""The actors of one run: how they are started, where they are placed, and what all of them are asked."""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster import PART_LOST, kill, reason_of
from actors.learner import LearnerCalls
from actors.prm import PrmActor
from actors.rollout_worker import RolloutWorkerActor
from actors.store import StoreActor
from configs.errors import UserError
from configs.run import RunConfig
from learner.learner import Learner
from learner.optim import Ranks
from ray_jobs.run.deaths import Death
from ray_jobs.run.folder import RunFolder, fingerprint_of
from ray_jobs.run.model_folder import resolve_model
from ray_jobs.run.resources import (
    free,
    lacking,
    learner_resources,
    place_here,
    place_learner,
    prm_resources,
    start_base,
    start_learner,
    this_node,
    thread_env,
    training_env,
    worker_resources,
)
from ray_jobs.run.watch import Watch
from reward.prm.model import WEIGHTS, prm_in_use, read_prm_manifest
from rollout.engines.base_weights import BaseWeights, ExportedBase
from rollout.store.adapters import AdapterMismatchError
from rollout.store.casualties import Loss
from rollout.worker import Worker

if TYPE_CHECKING:
    from actors.handles import BaseHandle, Call, LearnerHandle, PrmHandle, StoreHandle, WorkerHandle

Takes = ParamSpec("Takes")
Answer = TypeVar("Answer")

SYNC_PATIENCE_S = 300.0
CLOSE_PATIENCE_S = 90.0
"""More than an engine gives its own thread to finish."""
PLACE_EVERY_S = 1.0

BuildLearner = Callable[..., Learner]
BuildWorker = Callable[..., Worker]
BuildBase = Callable[[], BaseWeights]
"""They make the plain objects, in the processes of their actors: a worker by its index, a learner of several ranks by
which of them it is; with `base`, who holds the base weights that both of them read."""


class NoRoomError(UserError):
    """The cluster lacks the resources that an actor of the run claims; the message says which."""


class BaseLostError(UserError):
    """The process that holds the base weights ended; the message says what to do."""


class RunActors:
    """Store, learner, rollout workers by their index, and the PRM (None for a run without one). Workers and PRM are
    started by whoever wants them."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        build_learner: BuildLearner,
        build_worker: BuildWorker,
        build_base: BuildBase | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Without a `watch` nothing that hangs is noticed. `build_base` where learner and first worker share their base
        weights."""
        self._config = config
        self._folder = folder
        self._build_learner = build_learner
        self._build_worker = build_worker
        self._placements: dict[int, PlacementGroup] = {}
        self._by_index: dict[int, WorkerHandle] = {}
        self._nodes: dict[int, str] = {}
        self._lives: Counter[str] = Counter()
        self.watch = watch or Watch(config.liveness, resume=f"`agentflow resume {shlex.quote(str(folder.path))}`")
        self.prm: PrmHandle | None = None
        self._prm_place: PlacementGroup | None = None
        self.store: StoreHandle = StoreActor.options(name=self._name("store"), scheduling_strategy=this_node()).remote(
            config, folder.path
        )
        self.watch.follow("store", self.store, kind="store", floor_s=config.liveness.answer_s, restarts=True)
        # Its own as long as the run lasts: a worker that waits for room must not take that of a learner that died.
        self._learner_place = place_learner(config)
        self.base: BaseHandle | None = None
        if build_base:
            self.base = start_base(build_base, config.learner.device, self._learner_place, self._name("base-weights"))
        self._base_lost = self.base.until_lost.remote() if self.base else None
        self.learner = self._start_learner()

    @property
    def workers(self) -> "tuple[WorkerHandle, ...]":
        return tuple(self._by_index.values())

    @property
    def uses_prm(self) -> bool:
        """Whether a process reward model is there and the recipe's credit asks it."""
        return self.prm is not None and self._config.reward.prm is not None

    @property
    def prm_digest(self) -> str | None:
        """Of the weights that the process reward model must have, which lie on disk; None where none is asked."""
        if not self.uses_prm:
            return None
        return str(read_prm_manifest(self._prm_folder)["files"][WEIGHTS])

    @property
    def _prm_folder(self) -> Path:
        return Path(self._config.reward.prm_path) if self._config.reward.prm_path else self._folder.prm

    @property
    def worker_indices(self) -> tuple[int, ...]:
        return tuple(self._by_index)

    @property
    def by_index(self) -> "dict[int, WorkerHandle]":
        """The workers of this moment, whatever starts and ends others meanwhile."""
        return dict(self._by_index)

    def worker(self, index: int) -> "WorkerHandle":
        return self._by_index[index]

    def start_prm(self, base: Path) -> None:
        """A process reward model over this base: the one that the recipe names, or one that the run will train."""
        settings = prm_in_use(self._config)
        share = prm_resources(self._config).get("GPU", 0.0)
        if share and not self._config.shares_card:
            self._prm_place = place_here([prm_resources(self._config)])
        place = self._prm_place or self._learner_place
        prm: PrmHandle = PrmActor.options(
            name=self._name("prm"),
            num_cpus=0,
            num_gpus=share,
            scheduling_strategy=PlacementGroupSchedulingStrategy(place) if share else this_node(soft=True),
            runtime_env={"env_vars": training_env(settings.num_threads, settings.device)},
        ).remote(settings, base, self._config.seed, self._prm_folder)
        self.prm = prm
        self.watch.follow("PRM", prm, kind="PRM", floor_s=self._config.liveness.work_s, restarts=True)

    def reserve(self, indices: Iterable[int]) -> None:
        """Ask for room for these workers on the cluster's machines, each on one of them. It is asked for once and the
        wish stands, so that a cluster that starts machines on demand knows of it."""
        for index in indices:
            if index not in self._placements and not self._beside_learner(index):
                self._placements[index] = placement_group([self._bundle])

    def reserved(self, indices: Iterable[int]) -> list[int]:
        """Those of these workers whose room the cluster keeps for them by now; each must have been asked for."""
        asked = list(indices)
        # One question for all, however many they are.
        states = placement_group_table() if asked else {}
        return [index for index in asked if states.get(self._place_of(index).id.hex(), {}).get("state") == "CREATED"]

    def release_unused(self, wanted: int) -> None:
        """Give back the room that was reserved and is not used, of workers beyond so many."""
        for index in [one for one in self._placements if one >= wanted and one not in self._by_index]:
            remove_placement_group(self._placements.pop(index))

    def start_worker(self, index: int) -> None:
        """A worker in a placement group of its own: a group cannot grow, and workers come and go. Only the first may
        stand beside the learner, in its. Raises NoRoomError when the cluster has no room for it within
        `cluster.patience_s`."""
        bundle = self._bundle
        self.reserve([index])
        if not self._place_of(index).wait(self._config.cluster.patience_s):
            self._leave(index)
            raise self.no_room(index)
        # Now: a place whose machine is lost has forgotten it.
        (self._nodes[index],) = {*placement_group_table(self._place_of(index))["bundles_to_node_id"].values()}
        self._by_index[index] = RolloutWorkerActor.options(
            name=self._name(f"rollout-{index}"),
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._place_of(index)),
            runtime_env={"env_vars": thread_env(self._config.rollout.engine.num_threads)},
        ).remote(self._config, index, self.store, self.prm if self.uses_prm else None, self._worker_builder(index))
        self.watch.follow(
            _worker_name(index),
            self._by_index[index],
            kind="rollout worker",
            floor_s=self._config.liveness.answer_s,
        )

    def no_room(self, index: int) -> NoRoomError:
        """What to say where a worker has no place."""
        return NoRoomError(
            f"no room for rollout worker {index}: it claims {self._bundle} on one machine, and in all the cluster has "
            f"{free(self._bundle)} free; lower rollout.num_workers, add a node, or set cluster.patience_s to as long "
            "as a node takes to start"
        )

    def check_base(self) -> None:
        """Raises BaseLostError where the process that holds the base weights is gone."""
        if self._base_lost is None or not ray.wait([self._base_lost], timeout=0)[0]:
            return
        try:
            ray.get(self._base_lost)
        except PART_LOST as error:
            raise BaseLostError(
                f"the process that held the base weights for learner and engine ended ({reason_of(error)}); go on with "
                f"`agentflow resume {shlex.quote(str(self._folder.path))}`, or set card.share_base=false"
            ) from error

    def node_of(self, index: int) -> str | None:
        """The machine on which a worker was started, by its id."""
        return self._nodes.get(index)

    def stop_worker(self, index: int) -> None:
        """End a worker's process and free its place."""
        self.watch.leave(_worker_name(index))
        kill(self._by_index.pop(index))
        self._leave(index)

    def part_from(self, index: int, reason: str) -> Loss:
        """End a worker, let go or lost; what it ran is run again."""
        self.stop_worker(index)
        return ray.get(self.store.release.remote(index, reason))

    def lose_worker(self, index: int, error: Exception) -> Death:
        """Part from a worker that died, or is given up."""
        node, part = self._nodes.get(index), _worker_name(index)
        loss = self.part_from(index, f"its worker was lost ({type(error).__name__})")
        why = self.watch.why(part) or reason_of(error)
        return Death(part=part, reason=why, node=node, fruitless=loss.fruitless, explained=loss.explained)

    def restart_learner(self) -> None:
        """Another learner in the place of this one, up. Raises NoRoomError where its machine is lost and no other has
        room within `cluster.patience_s` or sees the run folder, and one of PART_LOST where the new one dies as well."""
        kill(self.learner)
        self.learner = self._start_learner()
        self._wait_for_learner()
        self._check_learner_writes()

    def ask_learner(
        self, method: Callable[Concatenate[LearnerCalls, Takes], Answer], *args: Takes.args, **kwargs: Takes.kwargs
    ) -> Answer:
        """What a method of the learner returns; it has a time limit."""
        with self.watch.call("learner", self.learner, in_words(method)):
            return ray.get(self.learner_call(method, *args, **kwargs))

    def learner_call(
        self, method: Callable[Concatenate[LearnerCalls, Takes], Answer], *args: Takes.args, **kwargs: Takes.kwargs
    ) -> "ray.ObjectRef[Answer]":
        """The same as a reference, for whoever waits for other things as well."""
        call: Call[Takes, Answer] = getattr(self.learner, method.__name__)
        return call.remote(*args, **kwargs)

    def _wait_for_learner(self) -> None:
        """A place that was there may be lost with its machine while the learner starts in it."""
        ready, without_s, since = self.learner.ready.remote(), 0.0, time.monotonic()
        with self.watch.call("learner", self.learner, "start"):
            while not ray.wait([ready], timeout=PLACE_EVERY_S)[0]:
                now = time.monotonic()
                has_place = placement_group_table(self._learner_place).get("state") == "CREATED"
                without_s, since = 0.0 if has_place else without_s + now - since, now
                if without_s > self._config.cluster.patience_s:
                    raise NoRoomError(lacking("learner", learner_resources(self._config)))
            ray.get(ready)

    def wait_until_ready(self) -> None:
        """Returns when every actor is up; they load side by side. Raises NoRoomError where learner or PRM has no room
        within `cluster.patience_s`, or cannot write where the run does."""
        ray.get(self.store.heartbeat.remote())
        self._wait_for_learner()
        if self._prm_place and not self._prm_place.wait(self._config.cluster.patience_s):
            raise NoRoomError(lacking("PRM", [prm_resources(self._config)]))
        ray.get([actor.ready.remote() for actor in (*([self.prm] if self.prm else []), *self.workers)])
        self._check_learner_writes()
        if self.prm and not ray.get(self.prm.__ray_call__.remote(_sees, self._folder.path, self._folder.fingerprint)):
            raise self._writes_elsewhere("PRM")

    def _check_learner_writes(self) -> None:
        """Raises NoRoomError where one of its processes does not see the run folder."""
        sees = partial(_sees, None, self._folder.path, self._folder.fingerprint)
        answers = ray.get(self.learner.in_each_process.remote(sees))
        if not all(answers):
            raise self._writes_elsewhere("learner")

    def _writes_elsewhere(self, name: str) -> "NoRoomError":
        return NoRoomError(
            f"the {name} runs on a machine that does not see the run folder '{self._folder.path}', where it "
            "keeps its checkpoints; set output_dir to a folder that all machines share"
        )

    def sandboxes(self) -> list[str]:
        """The walls around the workers' code tools, which depend on their machines; each kind once."""
        states = ray.get([worker.sandbox.remote() for worker in self.workers])
        return sorted({str(state) for state in states if state is not None})

    def newest_version(self) -> int:
        """The version that was published last, -1 where none was."""
        return ray.get(self.store.next_version.remote()) - 1

    def publish_anew(self) -> int:
        """Publish the learner's weights under a version number that was never used; returns it."""
        self.ask_learner(LearnerCalls.renumber, ray.get(self.store.next_version.remote()))
        return self.ask_learner(LearnerCalls.publish, self.store)

    def bring_up(self, index: int) -> None:
        """Wait until a worker that was started is up and samples with the newest version. Raises AdapterMismatchError
        when it does not."""
        ray.get(self.worker(index).ready.remote())
        self._sync_weights([self.worker(index)])

    def sync_weights(self) -> None:
        """Wait until every worker samples with the version that was published last. Raises AdapterMismatchError when
        one of them does not."""
        self._sync_weights(self.workers)

    def _sync_weights(self, workers: "Iterable[WorkerHandle]") -> None:
        newest = self.newest_version()
        try:
            ray.get([worker.sync_weights.remote(newest) for worker in workers], timeout=SYNC_PATIENCE_S)
        except ray.exceptions.GetTimeoutError as error:
            raise AdapterMismatchError(
                f"a rollout worker did not take up version {newest} within {SYNC_PATIENCE_S:.0f} s; resume the run"
            ) from error

    def release(self) -> None:
        """Give back all room of a cluster that outlives the run; its actors have ended."""
        self.release_unused(0)
        for place in filter(None, (self._learner_place, self._prm_place)):
            remove_placement_group(place)

    def close(self) -> None:
        """End engines and sandboxes in order, if they end soon; the cluster's end would only kill them."""
        closed = [actor.close.remote() for actor in (*self.workers, *([self.base] if self.base else []))]
        ray.wait(closed, num_returns=len(closed), timeout=CLOSE_PATIENCE_S)

    @property
    def _bundle(self) -> dict[str, float]:
        return worker_resources(self._config)

    def _beside_learner(self, index: int) -> bool:
        return index == 0 and self._config.shares_card

    def _place_of(self, index: int) -> PlacementGroup:
        return self._learner_place if self._beside_learner(index) else self._placements[index]

    def _leave(self, index: int) -> None:
        if not self._beside_learner(index):
            remove_placement_group(self._placements.pop(index))

    def _name(self, role: str) -> str:
        """What Ray's dashboard calls an actor. Ray frees the name of one that was killed late, so each life of a role
        has its own."""
        self._lives[role] += 1
        life = f"#{self._lives[role]}" if self._lives[role] > 1 else ""
        return f"agentflow:{self._config.name}:{role}{life}"

    def _start_learner(self) -> "LearnerHandle":
        build = partial(self._build_learner, base=self.base) if self.base else self._build_learner
        return start_learner(self._config, build, self._learner_place, self._name("learner"))

    def _worker_builder(self, index: int) -> Callable[[], Worker]:
        """Only the first is where the shared base weights are."""
        build = partial(self._build_worker, index)
        return partial(build, base=self.base) if self.base and index == 0 else build


def start_actors(
    config: RunConfig, folder: RunFolder, model_path: Path, prm_base: Path | None, watch: Watch
) -> RunActors:
    """Create the actors; returns when learner and engines are up. `prm_base` is the base model of a process reward
    model, None for a run without one."""
    actors = RunActors(
        config,
        folder,
        build_learner=partial(_build_learner, config, model_path),
        build_worker=partial(_build_worker, config, model_path),
        build_base=partial(_build_base, config, model_path) if config.shares_base else None,
        watch=watch,
    )
    if prm_base:
        actors.start_prm(prm_base)
    # All are asked for before one is waited for: a cluster that starts machines starts them together.
    actors.reserve(range(config.rollout.num_workers))
    for index in range(config.rollout.num_workers):
        actors.start_worker(index)
    actors.wait_until_ready()
    return actors


def in_words(method: Callable[..., object]) -> str:
    """What a call of this is named to a person."""
    return method.__name__.replace("_", " ")


def _worker_name(index: int) -> str:
    return f"rollout worker {index}"


def _build_learner(
    config: RunConfig, model_path: Path, ranks: Ranks | None = None, base: "BaseHandle | None" = None
) -> Learner:
    model, shared = _model_here(config.model.path, model_path), _exported(base)
    weights = shared.parts() if shared else None
    return Learner(model, config.model, config.learner, seed=config.seed, ranks=ranks, base_weights=weights)


def _build_worker(config: RunConfig, model_path: Path, index: int, base: "BaseHandle | None" = None) -> Worker:
    return Worker(config, _model_here(config.model.path, model_path), index=index, base=_exported(base))


def _build_base(config: RunConfig, model_path: Path) -> BaseWeights:
    model, learner = _model_here(config.model.path, model_path), config.learner
    return BaseWeights(model, device=learner.device, precision=learner.precision)


def _exported(base: "BaseHandle | None") -> ExportedBase | None:
    """Of the base weights' holder, for this process; None without one."""
    return ray.get(base.export.remote()) if base else None


def _sees(_: object, folder: Path, fingerprint: str) -> bool:
    """Whether the folder is there, and is the driver's: another machine may have one of the same name."""
    return fingerprint_of(folder) == fingerprint


def _model_here(name: str, drivers: Path) -> Path:
    """The model's folder on this machine, which need not be the driver's: there it may have to be downloaded, too."""
    return drivers if drivers.exists() else resolve_model(name)
