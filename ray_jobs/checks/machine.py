"""This machine for a recipe: its cores, its cards and their driver."""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence

from configs.cluster import RANK_SHARE
from configs.loading import with_changes
from configs.run import RunConfig
from ray_jobs.run.model_folder import PreflightError

MIN_DRIVER = 580
"""Of CUDA 13, for which torch and vLLM of requirements-gpu.lock are built."""


def card_driver() -> str | None:
    """The driver's version as nvidia-smi tells it; None without the program, or where it finds no card."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = answer.stdout.strip().partition("\n")[0]
    return first if answer.returncode == 0 and first[:1].isdigit() else None


def too_old(driver: str) -> str | None:
    """What to say of a driver that CUDA 13 does not run on; None of one that it does."""
    if int(driver.partition(".")[0]) >= MIN_DRIVER:
        return None
    return f"the card's driver is {driver}, and CUDA 13 needs {MIN_DRIVER} or newer; update the driver"


def check_machine(config: RunConfig) -> None:
    """Whether this machine has the cores and the cards that the recipe asks for. Raises PreflightError."""
    if config.cluster.joined is not None:
        # On a cluster that exists already this machine says nothing about where models run.
        return
    _check_cores(config)
    _check_places(config)
    with_prm = config.reward.prm is not None
    if "cuda" in _devices(config) or (with_prm and config.prm.device == "cuda"):
        _check_cards(config)


def fitted(config: RunConfig, tell: Callable[[str], None]) -> RunConfig:
    """For a run that goes on here: with no more threads and rollout workers than this machine has cores for, which
    `tell` hears of. They decide how fast it is and how its sums are rounded, not what it does."""
    if config.cluster.joined is not None or "cuda" in _devices(config):
        return config
    cores = len(os.sched_getaffinity(0))
    changes = {
        name: most
        for name, asked, most in (
            *((name, threads, cores) for name, threads in _threads(config)),
            ("rollout.num_workers", config.rollout.num_workers, max(1, _places() - config.learner.num_workers)),
        )
        if asked > most
    }
    if not changes:
        return config
    tell(f"this machine has {cores} cores: goes on with {', '.join(f'{key}={most}' for key, most in changes.items())}")
    return with_changes(config, changes)


def _devices(config: RunConfig) -> list[str]:
    """Of the learner's ranks and of the engines."""
    ranks, engines = config.learner.num_workers, config.rollout.num_workers
    return [*[config.learner.device] * ranks, *[config.rollout.engine.device] * engines]


def _check_cores(config: RunConfig) -> None:
    """Raises PreflightError."""
    cores = len(os.sched_getaffinity(0))
    for name, threads in _threads(config):
        if threads > cores and "cuda" not in _devices(config):
            raise PreflightError(f"{name} = {threads} is more than this machine's {cores} cores; set {name}={cores}")


def _threads(config: RunConfig) -> list[tuple[str, int]]:
    """Of each part of the run, by the setting."""
    found = [
        ("rollout.engine.num_threads", config.rollout.engine.num_threads),
        ("learner.num_threads", config.learner.num_threads),
    ]
    return found + [("prm.num_threads", config.prm.num_threads)] * (config.reward.prm is not None)


def _places() -> int:
    """Of Ray, where it is started here."""
    return max(2, os.cpu_count() or 1)


def _check_places(config: RunConfig) -> None:
    """Ray waits without an end for places that a machine does not have. Raises PreflightError."""
    needed, places = len(_devices(config)), _places()
    if needed > places:
        raise PreflightError(
            f"rollout.num_workers = {config.rollout.num_workers} and the learner need {needed} CPU cores, this machine "
            f"has {places}; set rollout.num_workers={max(1, places - config.learner.num_workers)}"
        )


def _check_cards(config: RunConfig) -> None:
    """Raises PreflightError."""
    driver = card_driver()
    if driver and (old := too_old(driver)):
        raise PreflightError(f"{old}, or use a CPU recipe")
    num_gpus = _num_gpus()
    if num_gpus == 0:
        raise PreflightError(
            "the recipe asks for device 'cuda', and this machine has no CUDA GPU; use a CPU recipe, or set "
            "rollout.engine.device=cpu rollout.engine.adapter_mode=merged learner.device=cpu prm.device=cpu"
        )
    for key, cards in (
        ("rollout.engine.tensor_parallel", config.rollout.engine.tensor_parallel),
        ("learner.num_workers", config.learner.num_workers if config.learner.device == "cuda" else 1),
    ):
        if cards > num_gpus:
            raise PreflightError(
                f"{key} = {cards} needs as many cards, this machine has {num_gpus}; set {key}={num_gpus}"
            )
    _check_shares(config, num_gpus)


def _check_shares(config: RunConfig, num_gpus: int) -> None:
    """Whether every process finds its share of a card. Ray would wait for one without an end. Raises PreflightError."""
    engines = config.rollout.num_workers
    if _fit(_shares(config, engines), num_gpus):
        return
    most = max((count for count in range(engines) if _fit(_shares(config, count), num_gpus)), default=0)
    told = ", ".join(f"{name} {share:g}" for name, share in _shares(config, engines))
    cure = f"set rollout.num_workers to at most {most}" if most else "lower card.learner, card.engine or card.prm"
    raise PreflightError(f"shares of cards ({told}) do not fit on this machine's {num_gpus}; {cure}")


def _shares(config: RunConfig, num_engines: int) -> list[tuple[str, float]]:
    """What each process claims of one card; an engine over several cards claims each of them."""
    card, ranks, spread = config.card, config.learner.num_workers, config.rollout.engine.tensor_parallel
    engine = [("engine", card.engine if spread == 1 else 1.0)] * spread
    if config.shares_card:
        return [("shared card", 1.0), *engine * (num_engines - 1)]
    shares = [*[("learner", card.learner if ranks == 1 else RANK_SHARE)] * ranks] * (config.learner.device == "cuda")
    shares += engine * num_engines * (config.rollout.engine.device == "cuda")
    return shares + [("PRM", card.prm)] * (config.reward.prm is not None and config.prm.device == "cuda")


def _fit(shares: Sequence[tuple[str, float]], num_gpus: int) -> bool:
    """Each on the first card that has room for it, the largest first."""
    free = [1.0] * num_gpus
    for _, share in sorted(shares, key=lambda one: -one[1]):
        place = next((number for number, room in enumerate(free) if room >= share - 1e-9), None)
        if place is None:
            return False
        free[place] -= share
    return True


def _num_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    import torch

    return torch.cuda.device_count()
