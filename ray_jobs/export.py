"""Export a policy: a merged Hugging Face model, a GGUF file, a Modelfile, and a manifest of their origin."""

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

from configs.errors import UserError, reason
from configs.loading import load_run_config
from configs.rollout import PlannerAgentConfig
from configs.run import RunConfig
from envs.datasets.custom import CustomSources
from envs.datasets.sampler import held_out_tasks
from envs.tools.function_tool import function_schemas
from envs.tools.toolbox import Toolbox
from learner.checkpoint import read_manifest
from learner.export import digest_of, file_digests, size_of_weights, write_merged_model
from ray_jobs.gguf import go_template, measure_gap, render_modelfile, write_gguf
from ray_jobs.run.model_folder import resolve_model
from ray_jobs.run.origin import RunFolderError, check_trained_alike, checkpoint_at, run_of, saved_config, started_in
from rollout.agent.agent import build_chat
from rollout.agent.planner import opening, planner_grammar
from rollout.engines.served import PLAIN_SAMPLING

MANIFEST = "export.json"
HF_FOLDER = "hf"
SCHEMA = 1
PROMPT_SEED = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The policy to export."""

    config: RunConfig
    home: Path
    """The folder in which the config's relative paths start."""
    checkpoint: Path | None
    """None is the base model."""
    manifest: dict[str, Any] | None
    """The checkpoint's manifest."""


def run_export(
    source: str, recipe: Path | None, target: Path, *, formats: Sequence[str], quantization: str, num_prompts: int
) -> None:
    """Write the export to the new folder `target`, completely or not at all.

    Args:
        source: As `find_source` takes it.
        recipe: The recipe of a checkpoint outside of a run folder.
        target: The folder to create.
        formats: `hf`, `gguf` or both.
        quantization: The type of the GGUF file's matrices.
        num_prompts: Planner prompts for measuring the quantization; 0 does not measure it.
    """
    console = Console()
    policy = find_source(source, recipe)
    with chdir(policy.home):
        model_path = resolve_model(policy.config.model.path)
    if policy.checkpoint:
        check_trained_alike(policy.checkpoint, policy.config, model_path)
    _check_room(target, 3 * size_of_weights(model_path))
    prompts: list[tuple[str, str]] = []
    if "gguf" in formats:
        try:
            with chdir(policy.home):
                prompts = planner_openings(policy.config, num_prompts)
        except (ValueError, OSError, KeyError) as error:
            raise UserError(
                f"no planner prompts can be drawn to measure the quantization: {reason(error)}; correct it, or skip "
                "the measurement with --prompts 0"
            ) from error
    model, facts = policy.config.model, None
    with _whole_folder(target) as partial:
        merged = partial / HF_FOLDER
        with console.status("merging"):
            adapter = (policy.checkpoint / "adapter.safetensors").read_bytes() if policy.checkpoint else None
            precision = policy.config.rollout.engine.precision
            write_merged_model(
                model_path, adapter, merged, rank=model.lora_rank, alpha=model.lora_alpha, dtype=precision
            )
        if "gguf" in formats:
            with console.status(f"writing GGUF in {quantization}"):
                facts = _write_gguf(policy.config, merged, partial, quantization, prompts)
        if "hf" not in formats:
            shutil.rmtree(merged)
        manifest = _manifest(policy, model_path) | {"gguf": facts, "files": file_digests(partial)}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    console.print(f"exported {policy.checkpoint or 'the base model'} to {target}", markup=False)
    if facts and (gap := facts["gap"]):
        console.print(
            f"{quantization}: mean |log-prob gap| {gap['mean_abs_logprob']:.4f} nats, mean KL {gap['mean_kl']:.5f}, "
            f"same greedy answer for {gap['same_answers']} of {gap['num_prompts']} planner prompts"
        )


def find_source(source: str, recipe: Path | None) -> Source:
    """Return the policy that `source` names.

    `source` is `none` (the recipe's base model), a run folder (its newest valid checkpoint), a checkpoint or its
    adapter file. Without a recipe the settings are those of the run that the checkpoint belongs to.
    """
    if source == "none":
        return Source(config=load_run_config(recipe), home=Path.cwd(), checkpoint=None, manifest=None)
    checkpoint = checkpoint_at(Path(source).expanduser())
    manifest = read_manifest(checkpoint)
    if recipe:
        config, home = load_run_config(recipe), Path.cwd()
    elif run := run_of(checkpoint):
        try:
            config, home = saved_config(run), started_in(run)
        except RunFolderError as error:
            raise UserError(f"{error}; or move the checkpoint out of it and pass --recipe RECIPE") from error
    else:
        raise UserError(f"{checkpoint} is in no run folder; pass the recipe that trained it: --recipe RECIPE")
    return Source(config=config, home=home, checkpoint=checkpoint, manifest=manifest)


def _write_gguf(
    config: RunConfig, merged: Path, folder: Path, quantization: str, openings: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    gguf = folder / f"model-{quantization}.gguf"
    write_gguf(merged, gguf, quantization, name=f"agentflow {config.name}")
    chat = build_chat(merged)
    template = go_template(chat.pieces)
    parameters = {"temperature": 0.0, "num_ctx": config.rollout.engine.max_model_len, **PLAIN_SAMPLING}
    (folder / "Modelfile").write_text(render_modelfile(gguf.name, template, parameters))
    gap = None
    if prompts := [chat.prompt(*texts) for texts in openings]:
        grammar = planner_grammar(config.envs.actions, function_schemas(config.envs))
        max_tokens = config.rollout.max_turn_tokens
        gap = asdict(measure_gap(merged, gguf, prompts, grammar=grammar, max_new_tokens=max_tokens))
    return {
        "file": gguf.name,
        "quantization": quantization,
        "template": template,
        "parameters": parameters,
        "gap": gap,
    }


def planner_openings(config: RunConfig, count: int) -> list[tuple[str, str]]:
    """Return the system and user messages of the planner's first turn on held-out tasks; none for a custom agent."""
    if not count or not isinstance(config.agent, PlannerAgentConfig):
        return []
    own = CustomSources.of(config)
    tasks = held_out_tasks(config.envs.mix, count=count, seed=config.seed + PROMPT_SEED, custom=own)
    with Toolbox(config.envs) as toolbox, toolbox.episode() as tools:
        agent = config.agent
        return [opening(tools, task, agent.max_steps, prompt=agent.prompt) for task in tasks]


def _manifest(policy: Source, model_path: Path) -> dict[str, Any]:
    return {
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
        "packages": {name: importlib.metadata.version(name) for name in ("gguf", "transformers", "safetensors")},
    }


def _check_room(target: Path, needed: int) -> None:
    if target.exists():
        raise UserError(f"'{target}' exists; choose another folder, or remove it")
    nearest = next(path for path in target.absolute().parents if path.exists())
    free = shutil.disk_usage(nearest).free
    if free < needed:
        raise UserError(
            f"the export needs up to {needed / 2**20:.0f} MiB below '{nearest}', which has {free / 2**20:.0f} MiB "
            "free; free some, or choose another folder"
        )


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` if the body succeeds."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)
    except OSError as error:
        raise UserError(
            f"cannot write export '{target}': {error.strerror or error}; free space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_export(folder: Path, files: Sequence[str]) -> dict[str, Any]:
    """Return the manifest of an export after checking the digests of these files."""
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text()))
        for name in files:
            if digest_of(folder / name) != manifest["files"][name]:
                raise UserError(f"{folder / name} was changed after the export: its sha256 differs; export again")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} is not a complete export ({reason(error)}); run `agentflow export` again") from error
    return manifest
