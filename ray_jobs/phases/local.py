"""One process without Ray, for commands that only act: the same phases, agent and tools, over any back end."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from configs.backend import OllamaConfig, VllmConfig
from configs.run import RunConfig
from ray_jobs.attempts import Attempts
from ray_jobs.run.begun import check_trained_alike
from ray_jobs.run.console import Console, PhaseProgress
from ray_jobs.run.folder import RunPaths
from ray_jobs.run.model_folder import prm_base, resolve_model
from rollout.chat import ServedChat
from rollout.engines.engine import BackendError
from rollout.engines.served import OllamaEngine, OpenAiEngine
from rollout.worker import Solver, Worker

if TYPE_CHECKING:
    from envs.types import Task
    from reward.prm.training import LabelledStep
    from rollout.types import Group, Trajectory


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Nothing reaches stderr until the end, also of what native code and subprocesses write; all of it does when an
    exception ends it. Log messages and progress of a whole process go there, so it is for a short time only."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            kept.seek(0)
            os.write(stderr, kept.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)


class Rollouts(Attempts, Protocol):
    """A policy whose trajectories can be labelled and trained on: a `Worker` in this process, or `RayRollouts`."""

    async def collect_group(self, task: "Task", group_id: str, group_size: int) -> "Group":
        """Siblings of one task, at `collect.temperature`."""
        ...

    async def continue_from(self, trajectory: "Trajectory", num_turns: int, count: int) -> "Sequence[Trajectory]":
        """`count` new ends of a trajectory after its first `num_turns` planner turns."""
        ...


class LocalRun:
    """What a phase finds where a command runs it alone, without Ray. Nothing is marked as done: what is on disk is not
    made again. Engine and PRM are loaded when they are asked for."""

    def __init__(self, config: RunConfig, adapter: Path | None, opened: ExitStack) -> None:
        self.config = config
        self.console = Console()
        self.folder = RunPaths(config.run_path)
        self._adapter = adapter
        self._opened = opened

    @property
    def policy(self) -> dict[str, object]:
        """Which one samples `rollouts`. Raises CheckpointError."""
        from learner.checkpoint import read_manifest

        digest = read_manifest(self._adapter)["files"]["adapter.safetensors"] if self._adapter else None
        return {"model": self.config.model.path, "adapter": digest}

    @cached_property
    def rollouts(self) -> Rollouts:
        """The base model, or the checkpoint that the command names. Raises what `open_policy` raises."""
        return self._opened.enter_context(open_policy(self.config, self._adapter))

    @cached_property
    def prm(self) -> "LocalPrm":
        with self.console.phase("start"):
            return LocalPrm(self.config)

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[PhaseProgress]:
        return self.console.phase(name, total)

    def finished(self, phase: str) -> None:
        return None

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """The console shows enough."""


@contextmanager
def local_run(config: RunConfig, adapter: Path | None = None) -> Iterator[LocalRun]:
    with ExitStack() as opened:
        yield LocalRun(config, adapter, opened)


class LocalPrm:
    """A process reward model that is trained in this process."""

    def __init__(self, config: RunConfig) -> None:
        from reward.prm.model import ProcessRewardModel

        os.environ["OMP_NUM_THREADS"] = str(config.prm.num_threads)
        base = prm_base(config.prm.model_path)
        self._seed = config.seed
        self._prm = ProcessRewardModel(base, config.prm, seed=config.seed)
        self.score = self._prm.score

    def train(self, steps: "Sequence[LabelledStep]") -> Iterator[float]:
        """The loss of every optimizer step."""
        from reward.prm.training import train_prm

        return train_prm(self._prm, steps, seed=self._seed)

    def save(self, folder: Path, facts: dict[str, object]) -> str:
        self._prm.save(folder, **facts)
        return self._prm.digest

    def load(self, folder: Path) -> str:
        self._prm.load(folder)
        return self._prm.digest


@contextmanager
def open_worker(config: RunConfig, adapter: Path | None) -> Iterator[Solver]:
    """What `config.backend` names, ready to act. Raises CheckpointError and BackendError."""
    if config.backend.type == "vllm":
        with open_policy(config, adapter) as worker:
            yield worker
        return
    solver = _served(config, adapter)
    try:
        yield solver
    finally:
        solver.close()


@contextmanager
def open_policy(config: RunConfig, adapter: Path | None) -> Iterator[Worker]:
    """A worker that samples by itself, with a checkpoint's adapter or with the base model; what it samples can be
    trained on. Raises CheckpointError and BackendError before an engine is loaded."""
    from actors.cluster import QUIET

    if config.backend.type != "vllm":
        raise BackendError(
            f"backend.type = '{config.backend.type}' is for solve and evaluate: a server tells no log-probs, so what "
            "it samples can never be trained on; leave it out"
        )
    os.environ.update(QUIET | {"OMP_NUM_THREADS": str(config.rollout.engine.num_threads)})
    model_path = resolve_model(config.model.path)
    trained = _read_adapter(config, model_path, adapter) if adapter else None
    with quiet_loading():
        worker = Worker(config, model_path, index=0)
    try:
        if trained:
            asyncio.run(worker.engine.load_adapter(*trained))
        yield worker
    finally:
        worker.close()


def _read_adapter(config: RunConfig, model_path: Path, folder: Path) -> tuple[int, bytes]:
    """Version and bytes of a checkpoint's adapter. Raises CheckpointError and RunFolderError."""
    from learner.checkpoint import CheckpointError, read_manifest
    from rollout.engines.adapters import AdapterMerger

    version = int(read_manifest(folder)["policy_version"])
    check_trained_alike(folder, config, model_path)
    data = (folder / "adapter.safetensors").read_bytes()
    try:
        AdapterMerger(model_path, config.model.lora_alpha / config.model.lora_rank).check(
            data, rank=config.model.lora_rank
        )
    except ValueError as error:
        raise CheckpointError(
            f"the adapter in {folder} does not fit model.path = '{config.model.path}': {error}; give the recipe of the "
            "run that trained it"
        ) from error
    return version, data


def _served(config: RunConfig, adapter: Path | None) -> Solver:
    backend = config.backend
    assert not isinstance(backend, VllmConfig)
    if adapter is not None:
        raise BackendError(
            f"--adapter {adapter} needs backend.type = 'vllm': a server answers with the model that it serves; export "
            "the checkpoint (`agentflow export`) and serve that"
        )
    if "model" in (config.planner.verifier.type, config.planner.generator.type):
        raise BackendError(
            f"agent.verifier/generator.type = 'model' asks the frozen base model, which backend.type = "
            f"'{backend.type}' does not serve; set them to 'rule'"
        )
    engine: OllamaEngine | OpenAiEngine
    if isinstance(backend, OllamaConfig):
        engine = OllamaEngine(backend, num_ctx=config.rollout.engine.max_model_len, seed=config.seed)
    else:
        engine = OpenAiEngine(backend, seed=config.seed)
    asyncio.run(engine.check())
    return Solver(config, engine, ServedChat(), max_open=backend.max_concurrency)
