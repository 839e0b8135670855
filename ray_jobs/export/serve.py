"""Serve an export: make it a model of a running Ollama, and see that it answers as a planner."""

import asyncio
from pathlib import Path

from rich.console import Console

from configs.backend import OllamaConfig
from configs.errors import visible
from configs.run import RunConfig
from configs.wording import reason
from envs.tools.own_tool import function_schemas
from ray_jobs.export.export import ExportError, planner_openings, read_export
from rollout.agent.planner import FormatError, parse_decision, planner_schema
from rollout.engines.engine import BackendError, GenerationRequest
from rollout.engines.served import OllamaEngine
from rollout.types import Message


def run_serve(config: RunConfig, folder: Path) -> None:
    """`config` says the tools of the planner that is tried, and the Ollama that serves it. Raises ExportError and
    BackendError."""
    console = Console()
    exported = read_export(folder, ())
    gguf, agent = exported.get("gguf"), exported.get("source", {}).get("agent", "planner")
    if gguf is None:
        raise ExportError(f"{folder} holds no GGUF file; run `agentflow export ... --format gguf`")
    if agent != "planner":
        raise ExportError(
            f"{folder} was trained with agent.type = '{agent}', and `agentflow serve` knows the planner only; "
            "`agentflow solve` asks such an agent, and any server of models takes the export"
        )
    read_export(folder, (gguf["file"],))
    backend = config.backend
    if not isinstance(backend, OllamaConfig):
        raise ExportError(f"backend.type = '{backend.type}' takes no GGUF file; use 'ollama'")
    engine = OllamaEngine(backend, num_ctx=config.rollout.engine.max_model_len, seed=config.seed)
    first = _opening(config)
    with console.status(f"giving {gguf['file']} to {backend.base_url}"):
        asyncio.run(engine.create(folder / gguf["file"], gguf["template"], gguf["parameters"]))
    with console.status("asking it for a decision"):
        text = asyncio.run(_first_decision(engine, config, *first))
    console.print(
        f"{backend.base_url} serves '{backend.model}'; to a held-out task it answers {visible(text)}", markup=False
    )
    console.print(f"try it: agentflow solve QUESTION --backend ollama:{backend.model}", markup=False)


def _opening(config: RunConfig) -> tuple[str, str]:
    """The system's and the user's words of a held-out task. Raises ExportError."""
    try:
        (opening,) = planner_openings(config, 1)
    except (ValueError, OSError, KeyError) as error:
        raise ExportError(
            f"the held-out task that tries the model cannot be drawn: {reason(error)}; give the recipe that it was "
            "trained with, from the folder where its data are"
        ) from error
    return opening


async def _first_decision(engine: OllamaEngine, config: RunConfig, system: str, user: str) -> str:
    """Raises BackendError when the model does not answer as a planner."""
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
            "export, and that the recipe is the one it was trained with"
        ) from None
