"""One worker without Ray, for commands that only act: the same engine, agent and tools as in training."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.cluster import QUIET
from configs.run import RunConfig
from learner.checkpoint import read_manifest
from ray_jobs.preflight import resolve_model
from rollout.worker import Worker


@contextmanager
def open_worker(config: RunConfig, adapter: Path | None) -> Iterator[Worker]:
    """A worker that samples with a checkpoint's adapter, or with the base model. Raises CheckpointError."""
    import asyncio
    import os

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
