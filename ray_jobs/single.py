"""One worker without Ray, for commands that only act: the same agent and tools as in training, over any back end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from configs.run import RunConfig
from rollout.chat import ServedChat
from rollout.chat_http import ChatServer
from rollout.engine import BackendError
from rollout.ollama_engine import OllamaEngine
from rollout.openai_engine import OpenAiEngine
from rollout.solver import Solver

if TYPE_CHECKING:
    from rollout.worker import Worker


@contextmanager
def open_worker(config: RunConfig, adapter: Path | None) -> Iterator[Solver]:
    """What `config.backend` names, ready to act. Raises CheckpointError and BackendError."""
    if config.backend.kind == "vllm":
        with open_policy(config, adapter) as worker:
            yield worker
        return
    solver = _served(config, adapter)
    try:
        yield solver
    finally:
        solver.close()


@contextmanager
def open_policy(config: RunConfig, adapter: Path | None) -> "Iterator[Worker]":
    """A worker that samples by itself, with a checkpoint's adapter or with the base model; what it samples can be
    trained on. Raises CheckpointError and BackendError."""
    import os

    from actors.cluster import QUIET
    from learner.checkpoint import read_manifest
    from ray_jobs.model_folder import resolve_model
    from rollout.worker import Worker

    if config.backend.kind != "vllm":
        raise BackendError(
            f"backend.kind = '{config.backend.kind}' is for solve and evaluate: a server tells no log-probs, so what "
            "it samples can never be trained on; leave it out"
        )
    os.environ.update(QUIET | {"OMP_NUM_THREADS": str(config.rollout.engine.num_threads)})
    manifest = read_manifest(adapter) if adapter else None
    worker = Worker(config, resolve_model(config.model.path), index=0)
    try:
        if adapter and manifest:
            data = (adapter / "adapter.safetensors").read_bytes()
            asyncio.run(worker.engine.load_adapter(manifest["policy_version"], data))
        yield worker
    finally:
        worker.close()


def _served(config: RunConfig, adapter: Path | None) -> Solver:
    backend = config.backend
    if adapter is not None:
        raise BackendError(
            f"--adapter {adapter} needs backend.kind = 'vllm': a server answers with the model that it serves; export "
            "the checkpoint (`agentflow export`) and serve that"
        )
    if "model" in (config.rollout.verifier.kind, config.rollout.generator.kind):
        raise BackendError(
            f"rollout.verifier/generator.kind = 'model' asks the frozen base model, which backend.kind = "
            f"'{backend.kind}' does not serve; set them to 'rule'"
        )
    server = ChatServer(backend)
    if backend.kind == "ollama":
        engine: OllamaEngine | OpenAiEngine = OllamaEngine(
            server, backend, num_ctx=config.rollout.engine.max_model_len, seed=config.seed
        )
    else:
        engine = OpenAiEngine(server, backend, seed=config.seed)
    asyncio.run(engine.check())
    return Solver(config, engine, ServedChat(), max_open=backend.max_concurrency)
