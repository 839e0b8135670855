"""Whether this machine has what a recipe asks for: cores, and cards."""

import os
import shutil

from configs.run import RunConfig
from ray_jobs.model_folder import PreflightError

ACTORS_PER_GPU = 2


def check_machine(config: RunConfig) -> None:
    """Whether this machine has the cores and the cards that the recipe asks for. Raises PreflightError."""
    if config.cluster.joined is not None:
        # On a cluster that exists already this machine says nothing about where models run.
        return
    ranks, engines = config.learner.num_workers, config.rollout.num_workers
    devices = [*[config.learner.device] * ranks, *[config.rollout.engine.device] * engines]
    with_prm = config.reward.credit != "outcome"
    cores = len(os.sched_getaffinity(0))
    for name, threads in (
        ("rollout.engine.num_threads", config.rollout.engine.num_threads),
        ("learner.num_threads", config.learner.num_threads),
        *([("prm.num_threads", config.prm.num_threads)] if with_prm else []),
    ):
        if threads > cores and "cuda" not in devices:
            raise PreflightError(f"{name} = {threads} is more than this machine's {cores} cores; set {name}={cores}")
    # Ray waits without an end for places that a machine does not have.
    places = max(2, os.cpu_count() or 1)
    if len(devices) > places:
        raise PreflightError(
            f"rollout.num_workers = {engines} and the learner need {len(devices)} CPU cores, "
            f"this machine has {places}; set rollout.num_workers={max(1, places - ranks)}"
        )
    wants_card = "cuda" in devices or (with_prm and config.prm.device == "cuda")
    num_gpus = _num_gpus() if wants_card else 0
    if wants_card and num_gpus == 0:
        raise PreflightError(
            "the recipe asks for device 'cuda', and this machine has no CUDA GPU; use a CPU recipe, or set "
            "rollout.engine.device=cpu rollout.engine.adapter_mode=merged learner.device=cpu prm.device=cpu"
        )
    spread = config.rollout.engine.tensor_parallel
    for key, cards in (
        ("rollout.engine.tensor_parallel", spread),
        ("learner.num_workers", ranks if config.learner.device == "cuda" else 1),
    ):
        if cards > max(1, num_gpus):
            raise PreflightError(
                f"{key} = {cards} needs as many cards, this machine has {num_gpus}; set {key}={num_gpus}"
            )
    if devices.count("cuda") > ACTORS_PER_GPU * num_gpus:
        raise PreflightError(
            f"{devices.count('cuda')} actors on 'cuda' are more than {ACTORS_PER_GPU} for each of this machine's "
            f"{num_gpus} GPUs; set rollout.num_workers to at most {ACTORS_PER_GPU * num_gpus - 1}"
        )


def _num_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    import torch

    return torch.cuda.device_count()
