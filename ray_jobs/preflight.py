"""Checks before anything starts: a run that cannot work ends here, with one line that says what to do."""

import os
import shutil
from pathlib import Path

from configs.run import RunConfig
from learner.demo_model import ensure_demo_model


class PreflightError(RuntimeError):
    """The run cannot start; the message says what is wrong, its bound, its value and what to do."""


def check_before_start(config: RunConfig) -> Path:
    """Check machine and configuration; returns the folder of the base model. Raises PreflightError."""
    _check_data(config)
    _check_devices(config)
    if config.envs.search == "tavily" and not os.environ.get("TAVILY_API_KEY"):
        raise PreflightError("envs.search = 'tavily' needs TAVILY_API_KEY in the environment; or use 'offline'")
    model_path = resolve_model(config.model.path)
    _check_run_folder(config)
    return model_path


def resolve_model(path: str) -> Path:
    """The local folder of a model: the demo model, a folder, or a download from the model hub."""
    if path == "demo":
        return ensure_demo_model()
    folder = Path(path).expanduser()
    if path.startswith((".", "/", "~")) or folder.exists():
        if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
            raise PreflightError(
                f"model.path = '{path}' is no model folder (config.json and *.safetensors are needed); "
                "name a folder, a model hub id, or 'demo'"
            )
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path))
    except Exception as error:
        raise PreflightError(
            f"model.path = '{path}' is no local folder and could not be downloaded from the model hub "
            f"({type(error).__name__}); check the id and the network, or name a local folder"
        ) from error


def _check_data(config: RunConfig) -> None:
    from envs.datasets.registry import LOADERS

    unknown = [name for name in config.envs.mix if name not in LOADERS]
    if unknown:
        raise PreflightError(f"envs.mix names unknown data set '{unknown[0]}'; known: {', '.join(LOADERS)}")
    if config.envs.data_path and not Path(config.envs.data_path).is_file():
        raise PreflightError(f"envs.data_path = '{config.envs.data_path}' is no file")


def _check_devices(config: RunConfig) -> None:
    wants_gpu = "cuda" in (config.rollout.engine.device, config.learner.device)
    if wants_gpu and not _has_gpu():
        raise PreflightError(
            "the recipe asks for device 'cuda', and this machine has no CUDA GPU; use a CPU recipe, or set "
            "rollout.engine.device=cpu rollout.engine.adapter_mode=merged learner.device=cpu"
        )
    cores = os.cpu_count() or 1
    for name, threads in (
        ("rollout.engine.num_threads", config.rollout.engine.num_threads),
        ("learner.num_threads", config.learner.num_threads),
    ):
        if threads > cores and not wants_gpu:
            raise PreflightError(f"{name} = {threads} is more than the {cores} cores of this machine")


def _has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _check_run_folder(config: RunConfig) -> None:
    folder = Path(config.output_dir) / config.name
    if (folder / "config.json").exists():
        raise PreflightError(f"run folder '{folder}' holds a run already; choose another name=... or remove the folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise PreflightError(
            f"run folder '{folder}' is not writable ({error.strerror}); set output_dir=... to one that is"
        ) from error
