"""Export of a policy: a merged Hugging Face model, a GGUF file, a Modelfile and a manifest; and its use by Ollama."""

import asyncio
import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.errors import UserError, reason, visible
from configs.loading import load_run_config
from configs.rollout import PlannerAgentConfig
from configs.run import RunConfig
from envs.datasets.custom import CustomSources
from envs.datasets.sampler import held_out_tasks
from envs.tools.function_tool import function_schemas
from envs.tools.toolbox import Toolbox
from learner.checkpoint import read_manifest
from learner.export import file_digest, file_digests, write_merged_model
from ray_jobs.gguf import go_template, measure_gap, write_gguf
from ray_jobs.run.model_folder import resolve_model
from ray_jobs.run.origin import check_trained_alike, checkpoint_at, run_of, saved_config, started_in
from rollout.agent.agent import build_chat
from rollout.agent.planner import FormatError, opening, parse_decision, planner_grammar, planner_schema
from rollout.engines.engine import BackendError, GenerationRequest
from rollout.engines.served import PLAIN_SAMPLING, OllamaEngine
from rollout.files import named
from rollout.types import Message

MANIFEST = "export.json"
PROMPT_SEED = 2_000_000


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
    if target.exists():
        raise UserError(f"'{target}' exists; choose another folder, or remove it")
    console = Console()
    config, home, checkpoint = find_source(source, recipe)
    # The config's relative paths start in its home.
    with chdir(home):
        model_path = resolve_model(config.model.path)
        prompts = planner_openings(config, num_prompts) if "gguf" in formats else []
    if checkpoint:
        check_trained_alike(checkpoint, config, model_path)
    with _whole_folder(target) as partial:
        merged = partial / "hf"
        manifest: dict[str, Any] = {"source": _origin(config, checkpoint, model_path), "gguf": None}
        with console.status("merging"):
            adapter = (checkpoint / "adapter.safetensors").read_bytes() if checkpoint else None
            rank, alpha, dtype = config.model.lora_rank, config.model.lora_alpha, config.rollout.engine.precision
            write_merged_model(model_path, adapter, merged, rank=rank, alpha=alpha, dtype=dtype)
        if "gguf" in formats:
            with console.status(f"writing GGUF in {quantization}"):
                manifest["gguf"] = _write_gguf(config, merged, partial, quantization, prompts)
        if "hf" not in formats:
            shutil.rmtree(merged)
        versions = {name: importlib.metadata.version(name) for name in ("gguf", "transformers", "safetensors")}
        manifest |= {"packages": versions, "files": file_digests(partial)}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    console.print(f"exported {checkpoint or 'the base model'} to {target}", markup=False)
    if gap := (manifest["gguf"] or {}).get("gap"):
        console.print(
            f"{quantization}: mean |log-prob gap| {gap['mean_abs_logprob']:.4f} nats, mean KL {gap['mean_kl']:.5f}, "
            f"same greedy answer for {gap['same_answers']} of {gap['num_prompts']} planner prompts"
        )


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


def _write_gguf(
    config: RunConfig, merged: Path, folder: Path, quantization: str, openings: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    gguf = folder / f"model-{quantization}.gguf"
    write_gguf(merged, gguf, quantization, name=f"agentflow {config.name}")
    chat = build_chat(merged)
    template = go_template(chat.pieces)
    parameters = {"temperature": 0.0, "num_ctx": config.rollout.engine.max_model_len, **PLAIN_SAMPLING}
    lines = [f"FROM ./{gguf.name}", f'TEMPLATE """{template}"""']
    lines += [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    (folder / "Modelfile").write_text("\n".join(lines) + "\n")
    gap = None
    if prompts := [chat.prompt(*texts) for texts in openings]:
        grammar = planner_grammar(config.envs.actions, function_schemas(config.envs))
        gap = measure_gap(merged, gguf, prompts, grammar=grammar, max_new_tokens=config.rollout.max_turn_tokens)
    facts = {"file": gguf.name, "quantization": quantization, "template": template, "parameters": parameters}
    return facts | {"gap": gap}


def planner_openings(config: RunConfig, count: int) -> list[tuple[str, str]]:
    """Return the system and user messages of the planner's first turn on held-out tasks; none for a custom agent.

    Raises UserError if no task can be drawn.
    """
    if not count or not isinstance(config.agent, PlannerAgentConfig):
        return []
    try:
        own = CustomSources.of(config)
        tasks = held_out_tasks(config.envs.mix, count=count, seed=config.seed + PROMPT_SEED, custom=own)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(
            f"no held-out task can be drawn for a planner prompt: {reason(error)}; start in the folder with the data, "
            "or export with --prompts 0"
        ) from error
    with Toolbox(config.envs) as toolbox, toolbox.episode() as tools:
        return [opening(tools, task, config.agent.max_steps, prompt=config.agent.prompt) for task in tasks]


def _origin(config: RunConfig, checkpoint: Path | None, model_path: Path) -> dict[str, Any]:
    manifest = read_manifest(checkpoint) if checkpoint else None
    return {
        "run": config.name,
        "checkpoint": checkpoint.name if checkpoint else None,
        "policy_version": manifest["policy_version"] if manifest else None,
        "adapter_sha256": manifest["files"]["adapter.safetensors"] if manifest else None,
        "base_model": config.model.path,
        "base_sha256": {path.name: file_digest(path) for path in sorted(model_path.glob("*.safetensors"))},
        "lora_rank": config.model.lora_rank,
        "lora_alpha": config.model.lora_alpha,
        "agent": config.agent.type,
    }


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` if the body succeeds."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with named(target):
            partial.mkdir(parents=True)
            yield partial
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    """Create the model and ask it for one decision.

    Args:
        config: The recipe that trained the planner, for its tools; `backend` is the Ollama to use.
        folder: An export with a GGUF file.

    Raises:
        UserError, BackendError: The export is unusable, or the served model does not answer as a planner.
    """
    console = Console()
    manifest = read_export(folder, ())
    gguf, agent = manifest.get("gguf"), manifest.get("source", {}).get("agent", "planner")
    if gguf is None:
        raise UserError(f"{folder} holds no GGUF file; run `agentflow export ... --format gguf`")
    if agent != "planner":
        raise UserError(
            f"{folder} was trained with agent.type = '{agent}', and `agentflow serve` tries planners only; run such an "
            "agent with `agentflow solve`, or serve the export with any model server"
        )
    read_export(folder, (gguf["file"],))
    backend = config.backend
    if backend.type != "ollama":
        raise UserError(f"backend.type = '{backend.type}' takes no GGUF file; use 'ollama'")
    ((system, user),) = planner_openings(config, 1)
    engine = OllamaEngine(backend, num_ctx=config.rollout.engine.max_model_len, seed=config.seed)
    with console.status(f"sending {gguf['file']} to {backend.base_url}"):
        asyncio.run(engine.create(folder / gguf["file"], gguf["template"], gguf["parameters"]))
    with console.status("waiting for a decision"):
        text = asyncio.run(_first_decision(engine, config, system, user))
    console.print(
        f"{backend.base_url} serves '{backend.model}'; it answers a held-out task with {visible(text)}", markup=False
    )
    console.print(f"try it: agentflow solve QUESTION --backend ollama:{backend.model}", markup=False)


async def _first_decision(engine: OllamaEngine, config: RunConfig, system: str, user: str) -> str:
    actions, schemas = config.envs.actions, function_schemas(config.envs)
    completion = await engine.generate(
        GenerationRequest(
            trajectory_id="serve",
            prompt_token_ids=(),
            max_tokens=config.rollout.max_turn_tokens,
            temperature=0.0,
            messages=(Message(role="system", content=system), Message(role="user", content=user)),
            json_schema=planner_schema(actions, schemas),
        )
    )
    try:
        return parse_decision(completion.text, actions, schemas).to_json()
    except FormatError as error:
        raise BackendError(
            f"the served model does not answer as a planner: {error}; it wrote {completion.text[:200]!r}; check the "
            "export, and that the recipe is the one that trained it"
        ) from None
