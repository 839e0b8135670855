"""What the actors of a run take of a cluster, and how its learner is started."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.base_weights import BaseWeightsActor
from actors.learner import LearnerActor, LearnerGroupActor
from configs.cluster import BASE_SHARE, RANK_SHARE
from configs.run import RunConfig
from reward.prm.model import prm_in_use

if TYPE_CHECKING:
    from actors.handles import BaseHandle, LearnerHandle
    from learner.learner import Learner
    from rollout.engines.base_weights import BaseWeights

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 << 30)}
"""For glibc: what is freed stays with the process, instead of being fetched from the kernel again page by page."""


def worker_resources(config: RunConfig) -> dict[str, float]:
    """What a rollout worker takes, on one machine. An engine over several cards has them for itself."""
    engine = config.rollout.engine
    if engine.tensor_parallel > 1:
        return _bundle(float(engine.tensor_parallel))
    return _bundle(config.card.engine if engine.device == "cuda" else 0.0)


def learner_resources(config: RunConfig) -> list[dict[str, float]]:
    """What the learner's processes take, one entry for each."""
    learner = config.learner
    share = config.card.learner if learner.num_workers == 1 else RANK_SHARE
    if config.shares_base:
        share -= BASE_SHARE
    return [_bundle(share if learner.device == "cuda" else 0.0)] * learner.num_workers


def prm_resources(config: RunConfig) -> dict[str, float]:
    """What the process reward model takes of a card; nothing on a CPU."""
    return {"GPU": config.card.prm} if prm_in_use(config).device == "cuda" and config.card.prm else {}


def free(claim: Iterable[str]) -> dict[str, float]:
    """What the whole cluster has left of these resources."""
    left = ray.available_resources()
    return {name: left.get(name, 0.0) for name in claim}


def lacking(name: str, claims: Sequence[Mapping[str, float]]) -> str:
    """What to say where the cluster has no room for a part, whose processes claim this."""
    times = f", {len(claims)} times," if len(claims) > 1 else ""
    return (
        f"no room for the {name}: it claims {claims[0]} on one machine{times} and in all the cluster has "
        f"{free(claims[0])} free; add a node, or set cluster.patience_s to as long as a node takes to start"
    )


def place_here(bundles: Sequence[Mapping[str, float]]) -> PlacementGroup:
    """Room on one machine, the driver's if possible."""
    here = ray.get_runtime_context().get_node_id()
    return placement_group([dict(one) for one in bundles], "STRICT_PACK", _soft_target_node_id=here)


def place_learner(config: RunConfig) -> PlacementGroup:
    """Room for all processes of the learner or for none, near each other; for one process, here if possible. Where a
    card is shared it is the room of PRM and first worker as well: one whole card, which no other run can get between
    them, and no fraction of another."""
    bundles = [{"CPU": 2.0, "GPU": 1.0}] if config.shares_card else learner_resources(config)
    if len(bundles) > 1:
        return placement_group(bundles, "PACK")
    return place_here(bundles)


def start_learner(
    config: RunConfig, build_learner: "Callable[..., Learner]", place: PlacementGroup, name: str
) -> "LearnerHandle":
    """The learner as one actor of this name: itself, or the group that asks its ranks."""
    bundle, *others = learner_resources(config)
    env = training_env(config.learner.num_threads, config.learner.device)
    if others:
        return LearnerGroupActor.options(name=name, num_cpus=0, scheduling_strategy=this_node()).remote(
            config, build_learner, place, bundle, env
        )
    return LearnerActor.options(
        name=name,
        num_cpus=bundle["CPU"],
        num_gpus=bundle.get("GPU", 0),
        scheduling_strategy=PlacementGroupSchedulingStrategy(place),
        runtime_env={"env_vars": env},
    ).remote(config, build_learner)


def start_base(build_base: "Callable[[], BaseWeights]", device: str, place: PlacementGroup, name: str) -> "BaseHandle":
    """The base weights' holder, beside those that read it. Its allocator must not grow segments in place, whatever the
    shell says: to map these another process needs rights that a container does not give."""
    fixed_segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"} if device == "cuda" else {}
    return BaseWeightsActor.options(
        name=name,
        num_cpus=0,
        num_gpus=BASE_SHARE if device == "cuda" else 0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(place),
        runtime_env={"env_vars": thread_env(1) | fixed_segments},
    ).remote(build_base)


def this_node(*, soft: bool = False) -> NodeAffinitySchedulingStrategy:
    """Where the driver runs; elsewhere only if `soft`, and that machine is gone. An actor that claims nothing would be
    put on any machine."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=soft)


def thread_env(num_threads: int) -> dict[str, str]:
    """Ray would give an actor one thread. Waiting threads must soon sleep: where engine and learner share the cores,
    spinning ones cost them 40% of what they do together (`benchmarks/shared_cores.py`)."""
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "1000"}


def training_env(num_threads: int, device: str) -> dict[str, str]:
    """For processes that train. Microbatch sizes vary: without expandable segments the card's allocator fragments; on a
    CPU, fetching returned memory anew would take a sixth of each step."""
    if device == "cpu":
        return thread_env(num_threads) | KEEP_MEMORY
    return thread_env(num_threads) | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def _bundle(num_gpus: float) -> dict[str, float]:
    return {"CPU": 1.0, "GPU": num_gpus} if num_gpus else {"CPU": 1.0}
