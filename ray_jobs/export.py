"""Export of a policy: a merged Hugging Face model, a GGUF file, a Modelfile and a manifest."""

import importlib.metadata
import json
import shutil
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

from rich.console import Console

from configs.errors import UserError
from configs.run import RunConfig
from learner.checkpoint import read_manifest
from ray_jobs.gguf import go_template, write_gguf
from ray_jobs.run.model_folder import resolve_model
from ray_jobs.run.origin import checkpoint_at, run_of, saved_config, started_in
from rollout.chat import ChatFormat, reply_ends
from rollout.engines.adapters import write_merged_model
from rollout.engines.served import PLAIN_SAMPLING
from rollout.files import file_digest, file_digests, named, whole_folder
from rollout.model_files import weight_files

MANIFEST = "export.json"


def run_export(source: Path, target: Path, *, formats: Sequence[str], quantization: str) -> None:
    """Write the export of a run's checkpoint to the new folder `target`, completely or not at all.

    `source` is a run folder (its newest valid checkpoint), a checkpoint in one, or its adapter file. `formats` are
    `hf`, `gguf` or both, and `quantization` is the type of the GGUF file's matrices. Raises UserError.
    """
    if target.exists():
        raise UserError(f"'{target}' exists; choose another folder, or remove it")
    console = Console()
    checkpoint = checkpoint_at(source.expanduser())
    run = run_of(checkpoint)
    if run is None:
        raise UserError(f"{checkpoint} is in no run folder, whose config.json has the settings that an export needs")
    config = saved_config(run)
    # The config's relative paths start where the run started.
    with chdir(started_in(run)):
        model_path = resolve_model(config.model.path)
    with named(target), whole_folder(target) as partial:
        merged = partial / "hf"
        manifest: dict[str, object] = {"source": _origin(config, checkpoint, model_path), "gguf": None}
        with console.status("merging"):
            adapter = (checkpoint / "adapter.safetensors").read_bytes()
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
    console.print(f"exported {checkpoint} to {target}", markup=False)


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
    (folder / "Modelfile").write_text("\n".join(lines) + "\n")
    return {"file": gguf.name, "quantization": quantization}


def _origin(config: RunConfig, checkpoint: Path, model_path: Path) -> dict[str, object]:
    manifest = read_manifest(checkpoint)
    return {
        "run": config.name,
        "checkpoint": checkpoint.name,
        "policy_version": manifest["policy_version"],
        "adapter_sha256": manifest["files"]["adapter.safetensors"],
        "base_model": config.model.path,
        "base_sha256": {path.name: file_digest(path) for path in weight_files(model_path)},
        "lora_rank": config.model.lora_rank,
        "lora_alpha": config.model.lora_alpha,
        "agent": config.agent.type,
    }
