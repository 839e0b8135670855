"""A run in one process without Ray, for commands that do not train a policy: the same phases, agent and tools."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import UserError
from configs.rollout import VllmConfig
from configs.run import RunConfig
from ray_jobs.run.console import Console, PhaseProgress
from ray_jobs.run.folder import RunPaths
from ray_jobs.run.model_folder import prm_base, resolve_model
from ray_jobs.run.origin import check_trained_alike
from rollout.chat import Chat
from rollout.engines.engine import BackendError
from rollout.engines.served import OllamaEngine, OpenAiEngine
from rollout.worker import Solver, Worker

if TYPE_CHECKING:
    from reward.prm.training import LabelledStep


class LocalRun(ExitStack):
    """The counterpart of `Run` for a phase that runs alone, as a context. Engine and PRM load at their first use."""

    def __init__(self, config: RunConfig, adapter: Path | None = None) -> None:
        super().__init__()
        self.config = config
        self.console = Console()
        self.folder = RunPaths(config.run_path)
        self._adapter = adapter

    @property
    def policy(self) -> dict[str, object]:
        """Return what identifies the policy that `rollouts` samples."""
        from learner.checkpoint import read_manifest

        digest = read_manifest(self._adapter)["files"]["adapter.safetensors"] if self._adapter else None
        return {"model": self.config.model.path, "adapter": digest}

    @cached_property
    def rollouts(self) -> Worker:
        return self.enter_context(open_policy(self.config, self._adapter))

    @cached_property
    def prm(self) -> "LocalPrm":
        with self.console.phase("start"):
            return LocalPrm(self.config)

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[PhaseProgress]:
        """Show a phase on the console."""
        return self.console.phase(name, total)

    def finished(self, phase: str) -> None:
        """Return None: a local phase continues from its files on disk."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Discard metrics; the console shows the progress."""


class LocalPrm:
    """A process reward model that is trained in this process."""

    def __init__(self, config: RunConfig) -> None:
        from reward.prm.model import ProcessRewardModel

        os.environ["OMP_NUM_THREADS"] = str(config.prm.num_threads)
        self._seed = config.seed
        self._prm = ProcessRewardModel(prm_base(config.prm.model_path), config.prm, seed=config.seed)
        self.score = self._prm.score

    def train(self, steps: "Sequence[LabelledStep]") -> Iterator[float]:
        """Train, and yield the loss of every optimizer step."""
        from reward.prm.training import train_prm

        return train_prm(self._prm, steps, seed=self._seed)

    def save(self, folder: Path, facts: dict[str, object]) -> str:
        self._prm.save(folder, **facts)
        return self._prm.digest


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide everything that reaches stderr, also from native code and subprocesses, unless the body raises."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept, os.fdopen(os.dup(2), "wb", 0) as stderr:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            kept.seek(0)
            stderr.write(kept.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr.fileno(), 2)


@contextmanager
def open_worker(config: RunConfig, adapter: Path | None) -> Iterator[Solver]:
    """Open the engine that `config.backend` names: vLLM in this process, or a client of a server."""
    backend = config.backend
    if isinstance(backend, VllmConfig):
        with open_policy(config, adapter) as worker:
            yield worker
        return
    if adapter:
        raise BackendError(
            f"--adapter {adapter} needs backend.type = 'vllm': a server answers with its own model; export the "
            "checkpoint (`agentflow export`) and serve that"
        )
    if "model" in (config.planner.verifier, config.planner.generator):
        raise BackendError(
            "agent.verifier and agent.generator = 'model' ask the frozen base model, which backend.type "
            f"= '{backend.type}' does not serve; set them to 'rule'"
        )
    engine: OllamaEngine | OpenAiEngine
    if backend.type == "ollama":
        engine = OllamaEngine(backend, num_ctx=config.rollout.engine.max_model_len, seed=config.seed)
    else:
        engine = OpenAiEngine(backend, seed=config.seed)
    asyncio.run(engine.check())
    with closing(Solver(config, engine, Chat(), max_open=backend.max_concurrency)) as solver:
        yield solver


@contextmanager
def open_policy(config: RunConfig, adapter: Path | None) -> Iterator[Worker]:
    """Open a worker that samples trainable trajectories, with a checkpoint's adapter or the base model.

    Raises UserError or BackendError before an engine is loaded, if the adapter does not fit.
    """
    from actors.cluster import QUIET
    from learner.checkpoint import read_manifest
    from rollout.engines.adapters import AdapterMerger

    if config.backend.type != "vllm":
        raise BackendError(
            f"backend.type = '{config.backend.type}' is for solve and evaluate: a server returns no log-probs, which "
            "training needs; leave it out"
        )
    os.environ.update(QUIET | {"OMP_NUM_THREADS": str(config.rollout.engine.num_threads)})
    model, model_path = config.model, resolve_model(config.model.path)
    data = b""
    if adapter:
        check_trained_alike(adapter, config, model_path)
        data = (adapter / "adapter.safetensors").read_bytes()
        try:
            AdapterMerger(model_path, model.lora_alpha / model.lora_rank).check(data, rank=model.lora_rank)
        except ValueError as error:
            raise UserError(
                f"the adapter in {adapter} does not fit model.path = '{model.path}': {error}; pass the recipe of the "
                "run that trained it"
            ) from error
    with quiet_loading():
        worker = Worker(config, model_path, index=0)
    with closing(worker):
        if adapter:
            asyncio.run(worker.engine.load_adapter(int(read_manifest(adapter)["policy_version"]), data))
        yield worker
