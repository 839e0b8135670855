"""A run: its configuration, folder, console and actors; and which of its phases are done."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollout.store.disk import file_system_of

from actors.cluster import PART_LOST, reason_of, set_gauges, start_ray, stop_ray, unmade
from actors.prm import RemotePrm
from configs.errors import UserError
from configs.run import RunConfig
from ray_jobs.checks.tasks import notes_before_start
from ray_jobs.run.actors import RunActors, start_actors
from ray_jobs.run.console import Console, PhaseProgress
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.metrics import DESCRIPTIONS
from ray_jobs.run.model_folder import prm_base
from ray_jobs.run.preflight import Ready
from ray_jobs.run.provenance import shown, with_absolute_paths
from ray_jobs.run.rollouts import PinnedRollouts, RayRollouts
from ray_jobs.run.watch import Watch
from reward.prm.alarms import Alarm
from reward.prm.model import prm_in_use


class RunCutOffError(UserError):
    """The run ended before its time and can be resumed; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    config: RunConfig
    console: Console
    folder: RunFolder
    actors: RunActors

    @property
    def rollouts(self) -> RayRollouts:
        """The workers, for one phase outside of the RL loop."""
        return RayRollouts(self.actors, open_each=self._open_each, note=self.console.note)

    @property
    def policy(self) -> dict[str, object]:
        """Which one samples `rollouts`: versions of the run's own, on this model."""
        return {"model": self.config.model.path}

    def pinned_rollouts(self) -> PinnedRollouts:
        """The workers, between two steps of the RL loop, all with the version that is the newest now."""
        version = self.actors.newest_version()
        return PinnedRollouts(self.actors, open_each=self._open_each, note=self.console.note, policy_version=version)

    @property
    def _open_each(self) -> int:
        return 2 * self.config.rollout.engine.max_num_seqs

    @property
    def prm(self) -> RemotePrm:
        """The process reward model that the run trains."""
        assert self.actors.prm is not None
        return RemotePrm(self.actors.prm)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[PhaseProgress]:
        """A phase with its progress on the console. What the body puts into `facts` stands in the run folder once
        the body has ended, and marks the phase as done."""
        with self.console.phase(name, total) as progress:
            yield progress
        self.folder.finish_phase(name, self.console.phase_seconds[name] + progress.seconds_before, progress.facts)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Into the run folder, and to whoever watches the cluster."""
        self.folder.log_metrics(step, metrics)
        set_gauges(metrics, DESCRIPTIONS, run=self.config.name)

    def tell(self, *messages: str | Alarm | None) -> None:
        """What a person who watches should know; None is nothing."""
        for message in messages:
            if isinstance(message, Alarm):
                self.console.note(f"alarm: {message.message}; prm_weight is now {message.prm_weight:.3g}")
            elif message:
                self.console.note(message)

    def finished(self, phase: str) -> Mapping[str, Any] | None:
        """The facts of a phase that is done; None while it is not."""
        return self.folder.finished_phases.get(phase, {}).get("facts")


@contextmanager
def open_run(config: RunConfig, ready: Ready, *, with_prm: bool) -> Iterator[Run]:
    """Open the folder, start the actors; end them in order. An unfinished run in the folder is continued."""
    prm_path = prm_base(prm_in_use(config).model_path) if with_prm or config.reward.prm_path else None
    console = Console()
    with console.waiting("training questions to be compared with held-out ones"):
        notes = notes_before_start(config)
    for note in notes:
        console.note(note)
    with console.waiting("the run folder's lock"):
        opened = RunFolder.open(config, with_prm=with_prm, sandbox=ready.sandbox, tell=console.note)
    with opened as folder:
        folder.keep_tokenizer(ready.model_path)
        if (place := file_system_of(folder.path)).networked:
            console.note(
                f"the run folder is on a network file system ({place.kind}): the store has the ledger for itself, and "
                "`agentflow view` reads a copy of it, at most every 30 s"
            )
        resume_it = f"`agentflow resume {shlex.quote(shown(folder.path))}`"
        watch = Watch(
            config.liveness,
            resume=resume_it,
            note=console.note,
            deaths_before=folder.num_restarts(),
            counted=folder.keep_num_restarts,
        )
        console.late = watch.late
        config = with_absolute_paths(config)
        with console.waiting("Ray to start"):
            start_ray(config.cluster)
        try:
            with watch:
                with console.phase("start"):
                    actors = start_actors(config, folder, ready.model_path, prm_path, watch)
                for sandbox in actors.sandboxes():
                    console.note(f"code sandbox: {sandbox}")
                yield Run(config=config, console=console, folder=folder, actors=actors)
            with console.waiting("the engines to end"):
                actors.close()
        except PART_LOST as error:
            if why := unmade(error):
                raise RunCutOffError(
                    f"a part of the run could not be made: {why}; once that is mended, {resume_it} goes on"
                ) from error
            raise RunCutOffError(
                f"a part of the run died where it is not replaced: {reason_of(error)} ... {resume_it} goes on from here"
            ) from error
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{resume_it} goes on from here") from None
        finally:
            stop_ray()
