"""The folders of models: where they are, and whether a run can use what is in them."""

import filecmp
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import UserError
from configs.run import RunConfig
from learner.demo_model import ensure_demo_model

if TYPE_CHECKING:
    from ray_jobs.plan.shapes import ModelShape

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
"""Of a model on the hub: its configuration, tokenizer and chat template, and no weights."""
WEIGHTS = "*.safetensors"
OTHER_FORMS = ["*/*"]
"""Folders in which models of the hub have the same weights once more, for other programs."""

LARGEST_MERGED = 2_000_000_000
"""Weights of a model into which an engine on a card merges its adapters."""


class PreflightError(UserError):
    """The run cannot start; the message says what is wrong, its bound, its value and what to do."""


def resolve_model(path: str, *, key: str = "model.path", weights: bool = True) -> Path:
    """The local folder of a model: the demo model, a folder, or a download from the model hub, without `weights` of its
    small files only. `key` is the setting that names it. Raises PreflightError."""
    if path == "demo":
        try:
            return ensure_demo_model()
        except OSError as error:
            raise PreflightError(
                f"model.path = 'demo': {error}; AGENTFLOW_CACHE moves the folder it is unpacked into"
            ) from error
    folder = Path(path).expanduser()
    if path.startswith((".", "/", "~")) or folder.exists():
        if not (folder / "config.json").is_file() or not list(folder.glob(WEIGHTS)):
            raise PreflightError(
                f"{key} = '{path}' is no model folder (config.json and *.safetensors are needed); "
                "name a folder, a model hub id, or 'demo'"
            )
        return folder.resolve()
    try:
        from huggingface_hub import snapshot_download

        wanted = [*SMALL_FILES, WEIGHTS] if weights else SMALL_FILES
        folder = Path(snapshot_download(path, allow_patterns=wanted, ignore_patterns=OTHER_FORMS))
    except Exception as error:
        raise PreflightError(
            f"{key} = '{path}' is no local folder and could not be downloaded from the model hub "
            f"({type(error).__name__}); check the id and the network, or name a local folder"
        ) from error
    if weights and not list(folder.glob(WEIGHTS)):
        raise PreflightError(
            f"{key} = '{path}' came without weights: the model hub, or without a network this machine's cache, has "
            f"no {WEIGHTS} of it; name a model that has them"
        )
    return folder


def same_weights(one: Path, other: Path) -> bool:
    """Whether two folders of models hold the same weights, byte by byte."""
    if one.samefile(other):
        return True
    names, others = (sorted(path.name for path in folder.glob(WEIGHTS)) for folder in (one, other))
    return names == others and filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def check_model(config: RunConfig, *, training: bool = False, download: bool = True) -> Path:
    """The folder of the base model, once all is known to fit that its small files tell: what cannot be used, or not
    trained where that is wanted, is not downloaded. Raises PreflightError."""
    folder = resolve_model(config.model.path, weights=False)
    if training:
        _check_shape(config, folder)
    longest = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    wanted = config.rollout.engine.max_model_len
    if longest is not None and wanted > longest:
        raise PreflightError(
            f"rollout.engine.max_model_len = {wanted} is more than the {longest} tokens that model.path = "
            f"'{config.model.path}' was made for; set it to at most {longest}"
        )
    _check_chat(config.model.path, folder)
    return resolve_model(config.model.path) if download else folder


def _check_shape(config: RunConfig, folder: Path) -> None:
    """Whether the learner can train this model, and every new version is merged in seconds. Raises PreflightError."""
    with _shape_of(folder, f"model.path = '{config.model.path}'") as shape:
        shape.lora_parameters(config.model.lora_rank, config.model.lora_targets)
        shape.check_cards(config.rollout.engine.tensor_parallel)
    engine = config.rollout.engine
    merges = (engine.device, engine.adapter_mode) == ("cuda", "merged")
    if merges and shape.num_parameters > LARGEST_MERGED:
        raise PreflightError(
            "rollout.engine.adapter_mode = 'merged' reads all weights and folds the adapter in on the CPU "
            f"for every version, which takes minutes for the {shape.num_parameters:,} of '{config.model.path}' (at "
            f"most {LARGEST_MERGED:,}); on a card set rollout.engine.adapter_mode=native"
        )


@contextmanager
def _shape_of(folder: Path, name: str) -> "Iterator[ModelShape]":
    """To look at. Raises PreflightError for a model of a family that is not trained here, and for what the shape
    refuses meanwhile."""
    from ray_jobs.plan.shapes import PlanError, read_shape

    try:
        yield read_shape(json.loads((folder / "config.json").read_text()), name=name)
    except PlanError as error:
        raise PreflightError(f"{error} (docs/your-model.md says which models train)") from error


def _check_chat(path: str, folder: Path) -> None:
    from rollout.agent.agent import check_chat
    from rollout.chat import ChatTemplateError

    try:
        check_chat(folder)
    except ChatTemplateError as error:
        raise PreflightError(
            f"model.path = '{path}' cannot hold the planner's dialogue: {error}; name an instruction-tuned model, or a "
            "copy of this one with another chat_template.jinja in its folder"
        ) from error


def prm_base(path: str) -> Path:
    """The folder of the model under a process reward model, which computes the same families as the learner: of another
    it would leave things out without a word, so that one is not downloaded. Raises PreflightError."""
    folder = resolve_model(path, key="prm.model_path", weights=False)
    with _shape_of(folder, f"prm.model_path = '{path}'"):
        return resolve_model(path, key="prm.model_path")


def check_prm(folder: Path) -> None:
    """Raises PreflightError."""
    if not (folder / "prm.json").is_file():
        raise PreflightError(
            f"reward.credit.prm_path = '{folder}' holds no process reward model; name the prm/ folder of a run that "
            "trained one (`agentflow train` or `agentflow train-prm`), or leave it out"
        )
