"""`agentflow serve`: create a model in a running Ollama from an export, and check that it answers as a planner."""

import asyncio
from pathlib import Path

from rich.console import Console

from configs.errors import UserError, visible
from configs.run import RunConfig
from envs.tools.function_tool import function_schemas
from ray_jobs.export import planner_openings, read_export
from rollout.agent.planner import FormatError, parse_decision, planner_schema
from rollout.engines.engine import BackendError, GenerationRequest
from rollout.engines.served import OllamaEngine
from rollout.types import Message


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
