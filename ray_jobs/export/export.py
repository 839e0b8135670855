"""Export a policy: a merged Hugging Face model, a GGUF file, a Modelfile, and what proves where they come from."""

import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.loading import load_run_config
from configs.rollout import PlannerAgentConfig
from configs.run import RunConfig
from configs.wording import reason
from envs.datasets.own import OwnSources
from envs.datasets.sampler import held_out_tasks
from envs.tools.own_tool import function_schemas
from envs.tools.toolbox import Toolbox
from learner.checkpoint import read_manifest
from learner.export import ExportError, digest_of, file_digests, size_of_weights, write_merged_model
from ray_jobs.export.gguf import go_template, render_modelfile, write_gguf
from ray_jobs.run.begun import (
    RunFolderError,
    begun_config,
    check_trained_alike,
    checkpoint_at,
    run_of,
    started_in,
)
from ray_jobs.run.model_folder import resolve_model
from rollout.agent.agent import build_chat
from rollout.agent.planner import opening, planner_grammar
from rollout.engines.served import PLAIN_SAMPLING

MANIFEST = "export.json"
HF_FOLDER = "hf"
SCHEMA = 1
PROMPT_SEED = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Which policy, and the run's settings that say how its adapter is folded in; their relative paths start in `home`.
    `checkpoint` None: the base."""

    config: RunConfig
    home: Path
    checkpoint: Path | None
    manifest: dict[str, Any] | None


def run_export(
    source: str, recipe: Path | None, target: Path, *, formats: Sequence[str], quantization: str, num_prompts: int
) -> None:
    """Writes the folder `target` whole or not at all. `num_prompts` planner prompts measure the quantisation; 0 leaves
    it unmeasured. Raises ExportError, CheckpointError, PreflightError, RunFolderError."""
    console = Console()
    policy = find_source(source, recipe)
    with chdir(policy.home):
        model_path = resolve_model(policy.config.model.path)
    if policy.checkpoint:
        check_trained_alike(policy.checkpoint, policy.config, model_path)
    _check_room(target, 3 * size_of_weights(model_path))
    openings = _drawn_openings(policy, num_prompts) if "gguf" in formats else []
    with _whole(target) as partial:
        with console.status("merging"):
            merged = _merge(policy, model_path, partial / HF_FOLDER)
        facts: dict[str, Any] = {"gguf": None}
        if "gguf" in formats:
            with console.status(f"writing GGUF in {quantization}"):
                facts["gguf"] = _write_gguf(policy.config, merged, partial, quantization, openings)
        if "hf" not in formats:
            shutil.rmtree(merged)
        _write_manifest(partial, policy, model_path, facts)
    console.print(f"exported {policy.checkpoint or 'the base model'} to {target}", markup=False)
    gap = (facts["gguf"] or {}).get("gap")
    if gap:
        console.print(
            f"{quantization}: mean |log-prob gap| {gap['mean_abs_logprob']:.4f} nats, mean KL "
            f"{gap['mean_kl']:.5f}, same greedy answer after {gap['same_answers']} of {gap['num_prompts']} planner "
            "prompts"
        )


def find_source(source: str, recipe: Path | None) -> Source:
    """`none` (the recipe's base model), a run folder (its newest good checkpoint), a checkpoint or its adapter file.
    Without a recipe the settings are those of the run that the checkpoint lies in."""
    if source == "none":
        return Source(config=load_run_config(recipe), home=Path.cwd(), checkpoint=None, manifest=None)
    checkpoint = checkpoint_at(Path(source).expanduser())
    manifest = read_manifest(checkpoint)
    if recipe:
        config, home = load_run_config(recipe), Path.cwd()
    elif run := run_of(checkpoint):
        config, home = _settings_of(run)
    else:
        raise ExportError(f"{checkpoint} lies in no run folder; name the recipe it was trained with: --recipe RECIPE")
    return Source(config=config, home=home, checkpoint=checkpoint, manifest=manifest)


def _settings_of(run: Path) -> tuple[RunConfig, Path]:
    """Those of a run, and the folder that it was started in."""
    try:
        return begun_config(run), started_in(run)
    except RunFolderError as error:
        raise ExportError(f"{error}; or copy the checkpoint out of it and name its recipe: --recipe RECIPE") from error


def _merge(policy: Source, model_path: Path, target: Path) -> Path:
    adapter = (policy.checkpoint / "adapter.safetensors").read_bytes() if policy.checkpoint else None
    model, dtype = policy.config.model, policy.config.rollout.engine.precision
    write_merged_model(model_path, adapter, target, rank=model.lora_rank, alpha=model.lora_alpha, dtype=dtype)
    return target


def _write_gguf(
    config: RunConfig, merged: Path, folder: Path, quantization: str, openings: Sequence[tuple[str, str]]
) -> dict[str, object]:
    gguf = folder / f"model-{quantization}.gguf"
    write_gguf(merged, gguf, quantization, name=f"agentflow {config.name}")
    chat = build_chat(merged)
    template = go_template(chat.pieces)
    parameters = {"temperature": 0.0, "num_ctx": config.rollout.engine.max_model_len, **PLAIN_SAMPLING}
    (folder / "Modelfile").write_text(render_modelfile(gguf.name, template, parameters))
    prompts = [chat.prompt(*text) for text in openings]
    gap = None
    if prompts:
        from ray_jobs.export.gap import measure_gap

        grammar = planner_grammar(config.envs.actions, function_schemas(config.envs))
        max_tokens = config.rollout.max_turn_tokens
        gap = measure_gap(merged, gguf, prompts, grammar=grammar, max_new_tokens=max_tokens)
    return {
        "file": gguf.name,
        "quantization": quantization,
        "template": template,
        "parameters": parameters,
        "gap": asdict(gap) if gap else None,
    }


def _drawn_openings(policy: Source, count: int) -> list[tuple[str, str]]:
    """As `planner_openings`, where the run was started. Raises ExportError."""
    try:
        with chdir(policy.home):
            return planner_openings(policy.config, count)
    except (ValueError, OSError, KeyError) as error:
        raise ExportError(
            f"the planner prompts that measure the quantisation cannot be drawn: {reason(error)}; put it right, or "
            "leave it unmeasured with --prompts 0"
        ) from error


def planner_openings(config: RunConfig, count: int) -> list[tuple[str, str]]:
    """The system's and the user's words before the first decision on so many held-out tasks; none where an agent of
    one's own writes its prompts."""
    if not count or not isinstance(config.agent, PlannerAgentConfig):
        return []
    path = Path(config.envs.data_path) if config.envs.data_path else None
    own = OwnSources.of(config)
    tasks = held_out_tasks(config.envs.mix, count=count, seed=config.seed + PROMPT_SEED, path=path, own=own)
    with Toolbox(config.envs) as toolbox, toolbox.episode() as tools:
        agent = config.agent
        return [opening(tools, task, agent.max_steps, prompt=agent.prompt) for task in tasks]


def _write_manifest(folder: Path, policy: Source, model_path: Path, facts: dict[str, object]) -> None:
    manifest = {
        "schema": SCHEMA,
        "source": {
            "run": policy.config.name,
            "checkpoint": policy.checkpoint.name if policy.checkpoint else None,
            "policy_version": policy.manifest["policy_version"] if policy.manifest else None,
            "adapter_sha256": policy.manifest["files"]["adapter.safetensors"] if policy.manifest else None,
            "base_model": policy.config.model.path,
            "base_sha256": {path.name: digest_of(path) for path in sorted(model_path.glob("*.safetensors"))},
            "lora_rank": policy.config.model.lora_rank,
            "lora_alpha": policy.config.model.lora_alpha,
            "agent": policy.config.agent.type,
        },
        **facts,
        "packages": {name: importlib.metadata.version(name) for name in ("gguf", "transformers", "safetensors")},
        "files": file_digests(folder),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _check_room(target: Path, needed: int) -> None:
    if target.exists():
        raise ExportError(f"'{target}' exists; choose another folder, or remove it")
    nearest = next(path for path in target.absolute().parents if path.exists())
    free = shutil.disk_usage(nearest).free
    if free < needed:
        raise ExportError(
            f"exporting takes up to {needed / 2**20:.0f} MiB below '{nearest}', which has {free / 2**20:.0f} MiB free; "
            "free some, or choose another folder"
        )


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `target` when everything is there."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)
    except OSError as error:
        raise ExportError(
            f"cannot write export '{target}': {error.strerror or error}; free space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_export(folder: Path, files: Sequence[str]) -> dict[str, Any]:
    """The manifest of an export of which these files match their digest. Raises ExportError."""
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text()))
        for name in files:
            if digest_of(folder / name) != manifest["files"][name]:
                raise ExportError(f"{folder / name} is not the file that was exported: its sha256 differs")
    except (OSError, ValueError, KeyError) as error:
        raise ExportError(f"{folder} is no complete export ({reason(error)}); run `agentflow export` again") from error
    return manifest
