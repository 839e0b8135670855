"""Resources that the parts of a run claim, as Ray placement bundles, and the environment of their processes."""

from configs.cluster import BASE_SHARE, RANK_SHARE
from configs.run import RunConfig
from reward.prm.model import prm_in_use

Bundle = dict[str, float]
"""Amounts of Ray resources that one process claims on one node."""

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
    """Return the bundles that are reserved for the learner.

    On a shared card this is the room of the PRM and the first worker as well: one whole card, so that no other run
    gets between them.
    """
    return [{"CPU": 2.0, "GPU": 1.0}] if config.shares_card else learner_bundles(config)


def thread_env(num_threads: int) -> dict[str, str]:
    """Return the environment of a process with this many threads.

    Ray would give an actor one thread. Waiting threads must sleep soon: if engine and learner share the cores, spinning
    threads cost 40% of their joint speed.
    """
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "1000"}


def training_env(num_threads: int, device: str) -> dict[str, str]:
    """Return the environment of a process that trains.

    The sizes of microbatches vary: without expandable segments a card's allocator fragments, and on a CPU fetching
    returned memory again takes a sixth of each step.
    """
    if device == "cpu":
        return thread_env(num_threads) | KEEP_MEMORY
    return thread_env(num_threads) | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def base_env(device: str) -> dict[str, str]:
    """Return the environment of the process that holds shared base weights.

    Its allocator must not grow segments in place: to map these, another process needs rights that a container does
    not give.
    """
    fixed_segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"} if device == "cuda" else {}
    return thread_env(1) | fixed_segments


def _bundle(num_gpus: float) -> Bundle:
    return {"CPU": 1.0, "GPU": num_gpus} if num_gpus else {"CPU": 1.0}
