"""A run: its configuration, folder, console and actors, and which of its phases are done."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from actors.cluster import PART_LOST, CutOffError, Handle, LearnerLostError, reason_of, set_gauges, start_ray
from actors.launch import Builders, Launcher, close
from actors.prm import RemotePrm
from actors.rollout_worker import WorkerPool
from actors.supervisor import Supervisor
from configs.errors import UserError, user_error
from configs.run import RunConfig
from learner.learner import Learner
from learner.optim import Ranks
from ray_jobs.run.console import Console, PhaseProgress
from ray_jobs.run.folder import RunFolder, fingerprint_of
from ray_jobs.run.metrics import DESCRIPTIONS
from ray_jobs.run.model_folder import model_notes, prm_base, resolve_model
from ray_jobs.run.origin import shown, with_absolute_paths
from ray_jobs.run.preflight import Ready
from ray_jobs.run.task_checks import notes_before_start
from reward.prm.model import WEIGHTS, prm_in_use, read_prm_manifest
from rollout.engines.base_weights import BaseWeights, ExportedBase
from rollout.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    config: RunConfig
    console: Console
    folder: RunFolder
    supervisor: Supervisor
    rollouts: WorkerPool
    """The workers as one policy, outside of training rollouts."""

    @property
    def sampling(self) -> Handle:
        return self.supervisor.sampling

    @property
    def prm(self) -> RemotePrm:
        return RemotePrm(self.supervisor.prm)

    @property
    def uses_prm(self) -> bool:
        return self.supervisor.prm is not None and self.config.reward.prm is not None

    @property
    def prm_digest(self) -> str | None:
        """The digest of the weights that the process reward model must have; None without one."""
        if not self.uses_prm:
            return None
        path = self.config.reward.prm_path
        return str(read_prm_manifest(Path(path) if path else self.folder.prm)["files"][WEIGHTS])

    def publish(self, *, renumber: bool = False) -> int:
        """Publish the learner's weights; return their version. `renumber` gives them a number that was never used."""
        if renumber:
            self.supervisor.learn("renumber", ray.get(self.sampling.next_version.remote()))
        self.rollouts.policy_version = self.supervisor.learn("publish", self.sampling)
        return self.rollouts.policy_version

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[PhaseProgress]:
        """Show the progress of a phase, and mark it as done, with the `facts` of its progress, when the body ends."""
        with self.console.phase(name, total) as progress:
            yield progress
        self.folder.finish_phase(name, self.console.phase_seconds[name] + progress.seconds_before, progress.facts)
        self.supervisor.progressed()

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.folder.log_metrics(step, metrics)
        set_gauges(metrics, DESCRIPTIONS, run=self.config.name)

    def tell(self, *messages: str | None) -> None:
        """Print messages on the console; None is skipped."""
        for message in filter(None, messages):
            self.console.note(message)

    def finished(self, phase: str) -> Mapping[str, Any] | None:
        """Return the facts of a phase that is done; None if it is not."""
        return self.folder.finished_phases.get(phase, {}).get("facts")


@contextmanager
def open_run(config: RunConfig, ready: Ready, *, with_prm: bool) -> Iterator[Run]:
    """Open the run folder and start the actors; end them in order. An unfinished run in the folder is resumed."""
    console = Console()
    with console.waiting("training questions to be compared with held-out ones"):
        for note in (*model_notes(config), *notes_before_start(config)):
            console.note(note)
    with console.waiting("the run folder's lock"):
        opened = RunFolder.open(config, with_prm=with_prm, sandbox=ready.sandbox, tell=console.note)
    resume = f"`agentflow resume {shlex.quote(shown(config.run_path))}`"
    try:
        with opened as folder:
            folder.keep_tokenizer(ready.model_path)
            config = with_absolute_paths(config)
            with console.waiting("Ray to start"):
                start_ray(config.cluster)
            try:
                with start_parts(config, folder, console, builders_of(config, ready, with_prm=with_prm)) as run:
                    states = ray.get([worker.sandbox.remote() for worker in run.supervisor.workers.values()])
                    for sandbox in sorted({str(state) for state in states if state is not None}):
                        console.note(f"code sandbox: {sandbox}")
                    yield run
            finally:
                ray.shutdown()
    except (*PART_LOST, LearnerLostError) as error:
        raise UserError(f"a part of the run was lost: {reason_of(error)}; resume with {resume}") from error
    except CutOffError as error:
        raise UserError(f"{error}; resume with {resume}") from error
    except (OSError, ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError) as error:
        if (line := user_error(error)) is None:
            raise
        raise UserError(f"{line}; resume with {resume}") from error
    except ray.exceptions.RayTaskError as error:
        if type(error.cause).__name__ != "OutOfMemoryError":
            raise
        raise UserError(
            f"the GPU's memory is full: {reason_of(error)}; lower learner.microbatch_tokens, prm.microbatch_tokens or "
            f"rollout.engine.kv_cache_gib, or set learner.gradient_checkpointing=true; resume with {resume} and these "
            "settings"
        ) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"resume with {resume}") from None


@contextmanager
def start_parts(config: RunConfig, folder: RunFolder, console: Console, builders: Builders) -> Iterator[Run]:
    """Launch the actors of a run and supervise them while the body runs."""
    sees_folder = partial(_sees, folder.path, fingerprint_of(folder.path))
    launcher = Launcher(config, folder.path, builders, sees_folder=sees_folder)
    try:
        with console.phase("start"):
            cluster = launcher.launch()
        supervisor = Supervisor(config, folder.path, launcher, cluster, note=console.note, waiting=console.waiting)
        console.late = supervisor.situation
        pool = WorkerPool(supervisor, max_open_each=2 * config.rollout.engine.max_num_seqs)
        with supervisor:
            yield Run(config=config, console=console, folder=folder, supervisor=supervisor, rollouts=pool)
        with console.waiting("the engines to end"):
            close([*supervisor.workers.values(), *filter(None, [cluster.base])])
    finally:
        launcher.free_all()


def builders_of(config: RunConfig, ready: Ready, *, with_prm: bool) -> Builders:
    """Return the functions that build the parts of a run."""
    return Builders(
        learner=partial(_build_learner, config, ready.model_path),
        worker=partial(_build_worker, config, ready.model_path),
        base=partial(_build_base, config, ready.model_path) if config.shares_base else None,
        prm_base=prm_base(prm_in_use(config).model_path) if with_prm or config.reward.prm_path else None,
    )


def _build_learner(
    config: RunConfig, model_path: Path, ranks: Ranks | None = None, base: Handle | None = None
) -> Learner:
    weights = exported.parts() if (exported := _exported(base)) else None
    model = _model_here(config.model.path, model_path)
    return Learner(model, config.model, config.learner, seed=config.seed, ranks=ranks, base_weights=weights)


def _build_worker(config: RunConfig, model_path: Path, index: int, base: Handle | None = None) -> Worker:
    return Worker(config, _model_here(config.model.path, model_path), index=index, base=_exported(base))


def _build_base(config: RunConfig, model_path: Path) -> BaseWeights:
    model, learner = _model_here(config.model.path, model_path), config.learner
    return BaseWeights(model, device=learner.device, precision=learner.precision)


def _exported(base: Handle | None) -> ExportedBase | None:
    return ray.get(base.export.remote()) if base else None


def _sees(folder: Path, fingerprint: str) -> bool:
    """Return whether this process sees the driver's run folder; another node may have one of the same name."""
    return fingerprint_of(folder) == fingerprint


def _model_here(name: str, drivers: Path) -> Path:
    """Return the model's folder on this node, where it may have to be downloaded as well."""
    return drivers if drivers.exists() else resolve_model(name)
