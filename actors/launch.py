"""Start of a run's actors: what each claims of the cluster, its environment, and what it is built from."""

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.cluster import CutOffError, Handle, LearnerLostError, reason_of
from actors.dynamic_sampling import DynamicSampling
from actors.learner import BaseWeightsActor, LearnerActor
from actors.prm import PrmActor
from actors.rollout_worker import RolloutWorkerActor
from configs.errors import UserError
from configs.run import BASE_SHARE, RANK_SHARE, RunConfig
from learner.learner import Learner
from reward.prm.model import prm_in_use
from rollout.engines.base_weights import BaseWeights
from rollout.worker import Worker

Bundle = dict[str, float]
"""Amounts of Ray resources that one process claims on one node."""
Strategy = NodeAffinitySchedulingStrategy | PlacementGroupSchedulingStrategy

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 << 30)}
"""Settings of glibc that keep freed memory in the process, instead of fetching it again page by page."""


def worker_bundle(config: RunConfig) -> Bundle:
    """Return the claim of a rollout worker. An engine over several cards has them for itself."""
    engine = config.rollout.engine
    if engine.tensor_parallel > 1:
        return _bundle(float(engine.tensor_parallel))
    return _bundle(config.card.engine if engine.device == "cuda" else 0.0)


def learner_bundles(config: RunConfig) -> list[Bundle]:
    """Return the claims of the learner's ranks, one for each."""
    learner = config.learner
    share = config.card.learner if learner.num_workers == 1 else RANK_SHARE
    if config.shares_base:
        share -= BASE_SHARE
    return [_bundle(share if learner.device == "cuda" else 0.0)] * learner.num_workers


def prm_bundle(config: RunConfig) -> Bundle:
    """Return the claim of the process reward model: a share of a card, or nothing on a CPU."""
    return {"GPU": config.card.prm} if prm_in_use(config).device == "cuda" and config.card.prm else {}


def learner_room(config: RunConfig) -> list[Bundle]:
    """Return the bundles that are reserved for the learner; one card for PRM and first worker too, if they share it."""
    return [{"CPU": 2.0, "GPU": 1.0}] if config.shares_card else learner_bundles(config)


def thread_env(num_threads: int) -> dict[str, str]:
    """Return the environment of a process with this many threads, to which Ray would give one.

    Waiting threads must sleep soon: where engine and learner share cores, spinning costs 40% of their joint speed.
    """
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "1000"}


def training_env(num_threads: int, device: str) -> dict[str, str]:
    """Return the environment of a process that trains.

    The sizes of microbatches vary: without expandable segments a card's allocator fragments, and on a CPU fetching
    returned memory again takes a sixth of each step.
    """
    memory = KEEP_MEMORY if device == "cpu" else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return thread_env(num_threads) | memory


def base_env(device: str) -> dict[str, str]:
    """Return the environment of the holder of base weights: in containers, segments that grow cannot be shared."""
    fixed_segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"} if device == "cuda" else {}
    return thread_env(1) | fixed_segments


def _bundle(num_gpus: float) -> Bundle:
    return {"CPU": 1.0, "GPU": num_gpus} if num_gpus else {"CPU": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Builders:
    """Functions that build the parts, each called in the process of its actor."""

    learner: Callable[..., Learner]
    """Called with the rank if there are several, and with `base=` if the base weights are shared."""
    worker: Callable[..., Worker]
    """Called with the index, the first one with `base=` if the base weights are shared."""
    base: Callable[[], BaseWeights] | None = None
    prm_base: Path | None = None
    """Base model of the process reward model; None for a run without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The actors of a run as they were launched; the supervisor replaces those that are lost."""

    sampling: Handle
    learner: tuple[Handle, ...]
    workers: dict[int, tuple[Handle, str]]
    """Rollout workers by index, each with the id of its node."""
    prm: Handle | None
    base: Handle | None


class Launcher:
    """Starts each part of a run in its room, a placement group, which no other part can take while it is restarted."""

    def __init__(self, config: RunConfig, folder: Path, builders: Builders, *, sees_folder: Callable[[], bool]) -> None:
        """`sees_folder` checks in another process that it sees the same run folder."""
        self._config = config
        self._folder = folder
        self._builders = builders
        self._sees_folder = sees_folder
        self._worker_rooms: dict[int, PlacementGroup] = {}
        room = learner_room(config)
        self._learner_room = _near_driver(room) if len(room) == 1 else placement_group(room, "PACK")
        has_prm_room = builders.prm_base and prm_bundle(config) and not config.shares_card
        self._prm_room = _near_driver([prm_bundle(config)]) if has_prm_room else None
        self._base: Handle | None = None
        self._built: list[ray.ObjectRef[bool]] = []

    # --- single parts ----------------------------------------------------------------------------

    def start_base(self) -> Handle | None:
        """Start the holder of the shared base weights; return None if they are not shared."""
        if self._builders.base is None:
            return None
        device = self._config.learner.device
        claim = {"GPU": BASE_SHARE} if device == "cuda" else {}
        strategy = PlacementGroupSchedulingStrategy(self._learner_room)
        options = self._options("base-weights", claim, strategy, base_env(device))
        self._base = BaseWeightsActor.options(**options).remote(self._builders.base)
        return self._base

    def start_learner(self) -> tuple[Handle, ...]:
        """Start the learner's ranks, which build their models; `wait_for_learner` waits for that."""
        bundles, learner = learner_bundles(self._config), self._config.learner
        env = training_env(learner.num_threads, learner.device)
        ranks = []
        for rank, bundle in enumerate(bundles):
            room = PlacementGroupSchedulingStrategy(self._learner_room, rank)
            options = self._options("learner" if rank == 0 else f"learner-rank-{rank}", bundle, room, env)
            ranks.append(LearnerActor.options(**options).remote(self._config, rank, len(bundles)))
        build = partial(self._builders.learner, base=self._base) if self._base else self._builders.learner
        meeting = ranks[0].open_meeting.remote() if len(ranks) > 1 else None
        self._built = [rank.build.remote(build, meeting, self._sees_folder) for rank in ranks]
        return tuple(ranks)

    def wait_for_learner(self) -> None:
        """Wait until the learner that was started last is built. Raise LearnerLostError if that fails.

        Raises CutOffError if it has no room for `cluster.patience_s`, as after the loss of a node, and UserError if it
        does not see the run folder.
        """
        pending, limits = self._built, self._config.cluster
        roomless_s, started = 0.0, time.monotonic()
        while pending:
            done, pending = ray.wait(pending, timeout=1.0)
            try:
                sees_folder = all(ray.get(done))
            except ray.exceptions.RayError as error:
                raise LearnerLostError(f"it could not be built: {reason_of(error)}") from error
            if not sees_folder:
                raise self._sees_other_folder("learner")
            has_room = placement_group_table(self._learner_room).get("state") == "CREATED"
            roomless_s = 0.0 if has_room else roomless_s + 1.0
            if roomless_s > limits.patience_s:
                raise self.no_room("learner", learner_bundles(self._config))
            if time.monotonic() - started > limits.start_s:
                raise LearnerLostError(f"it was not built within 12 * cluster.answer_s = {limits.start_s:g} s")

    def start_prm(self) -> Handle:
        """Start the process reward model that the recipe names, or the one that the run will train."""
        settings, bundle = prm_in_use(self._config), prm_bundle(self._config)
        path = Path(self._config.reward.prm_path) if self._config.reward.prm_path else self._folder / "prm"
        strategy = _on_this_node(soft=True)
        if bundle:
            strategy = PlacementGroupSchedulingStrategy(self._prm_room or self._learner_room)
        options = self._options("prm", bundle, strategy, training_env(settings.num_threads, settings.device))
        return PrmActor.options(**options).remote(settings, self._builders.prm_base, self._config.seed, path)

    def reserve_workers(self, indices: Collection[int]) -> None:
        """Ask for room for these workers. The requests stand, so that a cluster that adds nodes on demand sees them."""
        for index in indices:
            if index == 0 and self._config.shares_card:
                self._worker_rooms[0] = self._learner_room
            elif index not in self._worker_rooms:
                self._worker_rooms[index] = placement_group([worker_bundle(self._config)])

    def with_room(self, indices: Collection[int]) -> list[int]:
        """Return those of these workers whose room is there; it must have been reserved."""
        states = placement_group_table() if indices else {}
        rooms = {index: self._worker_rooms[index].id.hex() for index in indices}
        return [index for index, room in rooms.items() if states.get(room, {}).get("state") == "CREATED"]

    def start_worker(self, index: int, sampling: Handle, prm: Handle | None) -> tuple[Handle, str]:
        """Start a worker in its room, which must be there; return it with the id of its node."""
        room, bundle = self._worker_rooms[index], worker_bundle(self._config)
        (node,) = set(placement_group_table(room)["bundles_to_node_id"].values())
        build = partial(self._builders.worker, index)
        if self._base and index == 0:
            build = partial(build, base=self._base)
        strategy, env = PlacementGroupSchedulingStrategy(room), thread_env(self._config.rollout.engine.num_threads)
        options = self._options(f"rollout-{index}", bundle, strategy, env)
        return RolloutWorkerActor.options(**options).remote(self._config, index, sampling, prm, build), node

    def free_worker(self, index: int) -> None:
        """Give back the room of a worker that has ended."""
        room = self._worker_rooms.pop(index, self._learner_room)
        if room is not self._learner_room:
            remove_placement_group(room)

    def free_all(self) -> None:
        """Give back all room, on a cluster that outlives the run."""
        for room in filter(None, {*self._worker_rooms.values(), self._learner_room, self._prm_room}):
            remove_placement_group(room)

    # --- all of them -----------------------------------------------------------------------------

    def launch(self) -> Cluster:
        """Start all parts, which load side by side, and return when they are up."""
        options = self._options("dynamic-sampling", {}, _on_this_node())
        sampling = DynamicSampling.options(**options).remote(self._config)
        base, learner = self.start_base(), self.start_learner()
        prm = self.start_prm() if self._builders.prm_base else None
        indices = range(self._config.rollout.num_workers)
        self.reserve_workers(indices)
        workers = {}
        for index in indices:
            if not self._worker_rooms[index].wait(self._config.cluster.patience_s):
                raise self.no_room(f"rollout worker {index}", [worker_bundle(self._config)])
            workers[index] = self.start_worker(index, sampling, prm if self._config.reward.prm else None)
        self._wait({"dynamic sampling": sampling})
        self.wait_for_learner()
        if self._prm_room and not self._prm_room.wait(self._config.cluster.patience_s):
            raise self.no_room("PRM", [prm_bundle(self._config)])
        if prm is not None:
            self._wait({"PRM": prm})
            if not ray.get(prm.sees.remote(self._sees_folder)):
                raise self._sees_other_folder("PRM")
        self._wait({f"rollout worker {index}": worker for index, (worker, _) in workers.items()})
        return Cluster(sampling=sampling, learner=learner, workers=workers, prm=prm, base=base)

    def no_room(self, name: str, claims: Sequence[Bundle]) -> CutOffError:
        """Return the error for a part that has no room."""
        free = {resource: ray.available_resources().get(resource, 0.0) for resource in claims[0]}
        times = f" for each of {len(claims)} processes" if len(claims) > 1 else ""
        return CutOffError(
            f"no room for the {name}: it claims {claims[0]} on one node{times}, and the whole cluster has {free} free; "
            "add a node, lower rollout.num_workers, or set cluster.patience_s to the time in which a node starts"
        )

    def _wait(self, parts: dict[str, Handle]) -> None:
        """Wait for the first heartbeat of these parts."""
        limit_s = self._config.cluster.start_s
        beats = {part.heartbeat.remote(): name for name, part in parts.items()}
        deadline = time.monotonic() + limit_s
        while beats:
            done, _ = ray.wait([*beats], timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                names = ", ".join(beats.values())
                raise CutOffError(f"these parts did not start within 12 * cluster.answer_s = {limit_s:g} s: {names}")
            ray.get(done[0])
            del beats[done[0]]

    def _sees_other_folder(self, name: str) -> UserError:
        return UserError(
            f"the {name} runs on a node that does not see the run folder '{self._folder}', where checkpoints are "
            "written; set output_dir to a folder that all nodes share"
        )

    def _options(
        self, role: str, claim: Bundle, strategy: Strategy, env: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the options of an actor. Ray frees the name of a dead actor late, so each start has its own."""
        return {
            "name": f"agentflow:{self._config.name}:{role}:{secrets.token_hex(3)}",
            "num_cpus": claim.get("CPU", 0),
            "num_gpus": claim.get("GPU", 0),
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": dict(env or {})},
        }


def close(parts: Sequence[Handle]) -> None:
    """Close engines and sandboxes in order; an engine gives its own thread less than this limit to finish."""
    closed = [part.close.remote() for part in parts]
    ray.wait(closed, num_returns=len(closed), timeout=90.0)


def _near_driver(bundles: list[Bundle]) -> PlacementGroup:
    return placement_group(bundles, "STRICT_PACK", _soft_target_node_id=ray.get_runtime_context().get_node_id())


def _on_this_node(*, soft: bool = False) -> Strategy:
    """Return the driver's node, or another if `soft` and it is gone. Ray puts an actor that claims nothing on any."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=soft)
