"""Export of a policy: a merged Hugging Face model, a GGUF file, a Modelfile and a manifest; and its use by Ollama."""

import asyncio
import importlib.metadata
import json
import shutil
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.errors import UserError, reason
from configs.loading import load_run_config
from configs.run import RunConfig
from learner.checkpoint import read_manifest
from ray_jobs.gguf import go_template, write_gguf
from ray_jobs.run.model_folder import resolve_model
from ray_jobs.run.origin import check_trained_alike, checkpoint_at, run_of, saved_config, started_in
from rollout.chat import ChatFormat, reply_ends
from rollout.engines.adapters import write_merged_model
from rollout.engines.served import PLAIN_SAMPLING, OllamaEngine
from rollout.files import file_digest, file_digests, named, whole_folder
from rollout.model_files import weight_files

MANIFEST = "export.json"


def run_export(source: str, recipe: Path | None, target: Path, *, formats: Sequence[str], quantization: str) -> None:
    """Write the export of `find_source(source, recipe)` to the new folder `target`, completely or not at all.

    `formats` are `hf`, `gguf` or both, and `quantization` is the type of the GGUF file's matrices.
    """
    if target.exists():
        raise UserError(f"'{target}' exists; choose another folder, or remove it")
    console = Console()
    config, home, checkpoint = find_source(source, recipe)
    # The config's relative paths start in its home.
    with chdir(home):
        model_path = resolve_model(config.model.path)
    if checkpoint:
        check_trained_alike(checkpoint, config, model_path)
    with named(target), whole_folder(target) as partial:
        merged = partial / "hf"
        manifest: dict[str, object] = {"source": _origin(config, checkpoint, model_path), "gguf": None}
        with console.status("merging"):
            adapter = (checkpoint / "adapter.safetensors").read_bytes() if checkpoint else None
            rank, alpha, dtype = config.model.lora_rank, config.model.lora_alpha, config.rollout.engine.precision
            write_merged_model(model_path, adapter, merged, rank=rank, alpha=alpha, dtype=dtype)
        if "gguf" in formats:
            with console.status(f"writing GGUF in {quantization}"):
                manifest["gguf"] = _write_gguf(config, merged, partial, quantization)
        if "hf" not in formats:
            shutil.rmtree(merged)
        versions = {name: importlib.metadata.version(name) for name in ("gguf", "transformers", "safetensors")}
        manifest |= {"packages": versions, "files": file_digests(partial)}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    console.print(f"exported {checkpoint or 'the base model'} to {target}", markup=False)


def find_source(source: str, recipe: Path | None) -> tuple[RunConfig, Path, Path | None]:
    """Return the config of a policy, the folder in which its relative paths start, and the checkpoint, None for a base.

    `source` is `none` (the recipe's base model), a run folder (its newest valid checkpoint), a checkpoint or its
    adapter file. Without a recipe the settings are those of the run that the checkpoint belongs to.
    """
    checkpoint = None if source == "none" else checkpoint_at(Path(source).expanduser())
    if checkpoint is None or recipe:
        return load_run_config(recipe), Path.cwd(), checkpoint
    if run := run_of(checkpoint):
        return saved_config(run), started_in(run), checkpoint
    raise UserError(f"{checkpoint} is in no run folder; pass the recipe that trained it: --recipe RECIPE")


def _write_gguf(config: RunConfig, merged: Path, folder: Path, quantization: str) -> dict[str, object]:
    from transformers import AutoTokenizer

    gguf = folder / f"model-{quantization}.gguf"
    write_gguf(merged, gguf, quantization, name=f"agentflow {config.name}")
    tokenizer = AutoTokenizer.from_pretrained(merged)
    chat = ChatFormat(tokenizer)
    template, stops = go_template(chat.pieces), [chat.rendered([end]) for end in reply_ends(merged, tokenizer)]
    length = config.rollout.engine.max_model_len
    parameters: dict[str, object] = {"temperature": 0.0, "num_ctx": length, **PLAIN_SAMPLING}
    lines = [f"FROM ./{gguf.name}", f'TEMPLATE """{template}"""']
    lines += [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    parameters["stop"] = stops
    (folder / "Modelfile").write_text("\n".join(lines) + "\n")
    return {"file": gguf.name, "quantization": quantization, "template": template, "parameters": parameters}


def _origin(config: RunConfig, checkpoint: Path | None, model_path: Path) -> dict[str, object]:
    manifest = read_manifest(checkpoint) if checkpoint else None
    return {
        "run": config.name,
        "checkpoint": checkpoint and checkpoint.name,
        "policy_version": manifest and manifest["policy_version"],
        "adapter_sha256": manifest and manifest["files"]["adapter.safetensors"],
        "base_model": config.model.path,
        "base_sha256": {path.name: file_digest(path) for path in weight_files(model_path)},
        "lora_rank": config.model.lora_rank,
        "lora_alpha": config.model.lora_alpha,
        "agent": config.agent.type,
    }


def read_export(folder: Path, files: Sequence[str]) -> dict[str, Any]:
    """Return the manifest of an export after checking the digests of these files."""
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text()))
        for name in files:
            if file_digest(folder / name) != manifest["files"][name]:
                raise UserError(f"{folder / name} was changed after the export: its sha256 differs; export again")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} is not a complete export ({reason(error)}); run `agentflow export` again") from error
    return manifest


def run_serve(config: RunConfig, folder: Path) -> None:
    """Create a model from an export with a GGUF file in the Ollama of `backend`.

    Raises UserError or BackendError if the export is unusable, or if the server does not take it.
    """
    console = Console()
    gguf = read_export(folder, ()).get("gguf")
    if gguf is None:
        raise UserError(f"{folder} holds no GGUF file; run `agentflow export ... --format gguf`")
    read_export(folder, (gguf["file"],))
    backend = config.backend
    if backend.type != "ollama":
        raise UserError(f"backend.type = '{backend.type}' takes no GGUF file; use 'ollama'")
    engine = OllamaEngine(backend, num_ctx=config.rollout.engine.max_model_len, seed=config.seed)
    with console.status(f"sending {gguf['file']} to {backend.base_url}"):
        asyncio.run(engine.create(folder / gguf["file"], gguf["template"], gguf["parameters"]))
    console.print(f"{backend.base_url} serves '{backend.model}'", markup=False)
    console.print(f"try it: agentflow solve QUESTION --backend ollama:{backend.model}", markup=False)
