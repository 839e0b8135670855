"""Keeps the rollouts of a run going: starts them, replaces workers that die, adds workers where there is room."""

import shlex
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import ray

from ray_jobs.bottleneck import WorkerReading
from ray_jobs.run import Run
from rollout.adapter_store import AdapterMismatchError

LOOK_AROUND_S = 2.0
TEND_EVERY_S = 5.0
PLACE_PATIENCE_S = 5.0
"""The room that a dead worker had is free again within that, unless its machine went with it."""
PROOF_PATIENCE_S = 300.0
"""A worker that has not proven a version so long after its publication is replaced."""
MAX_DEATHS = 5
"""Deaths between two train steps after which the run ends: something is wrong that a new process does not mend."""

WORKER_LOST = (ray.exceptions.RayActorError, AdapterMismatchError)


class LearnerLostError(RuntimeError):
    """The learner died; its weights since the newest checkpoint are gone."""


class CrashLoopError(RuntimeError):
    """Parts of the run die faster than it gets anywhere; the message says which and why."""


class Supervisor(AbstractContextManager["Supervisor"]):
    """While it is open, workers roll out. Everything the loop waits for, it waits for through `get`."""

    def __init__(self, run: Run) -> None:
        self._cast = run.cast
        self._note = run.console.note
        config = run.config.rollout
        self._num_workers = max(config.num_workers, config.max_workers or 0)
        self._runs: dict[Any, int] = {}
        self._deaths: list[str] = []
        self._tended_at = time.monotonic()
        self._folder = run.folder.path
        self._wanted_file = run.folder.wanted_workers
        self.num_restarts = 0

    def __enter__(self) -> "Supervisor":
        for index in self._cast.worker_indices:
            self._roll_out(index)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cast.forget_places(0)
        while exc is None and self._runs:
            # Again each time: a store that was killed meanwhile has forgotten it.
            ray.get(self._cast.store.close.remote())
            done, _ = ray.wait(list(self._runs), num_returns=1, timeout=LOOK_AROUND_S)
            for run in done:
                self._ended(run, closing=True)

    def learn(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What a method of the learner returns. Raises LearnerLostError when the learner dies over it."""
        try:
            return self.get(getattr(self._cast.learner, method).remote(*arguments, **options))
        except ray.exceptions.RayActorError as error:
            raise LearnerLostError(str(error)) from error

    def get(self, reference: Any) -> Any:
        """The value of `reference`. Workers that die meanwhile are replaced, and new ones join. Raises what the call
        raises."""
        while True:
            self._tend()
            done, _ = ray.wait([reference, *self._runs], num_returns=1, timeout=LOOK_AROUND_S)
            if reference in done:
                return ray.get(reference)
            for run in done:
                self._ended(run)

    def progressed(self) -> None:
        """A train step ended: what died before it did no lasting harm."""
        self._deaths.clear()

    def replace_learner(self, error: Exception) -> None:
        """Start another learner in the place of one that died."""
        self._count_death("learner", error)
        self._cast.restart_learner()

    def readings(self) -> list[WorkerReading]:
        """What the workers did since they were asked last; those that are busy dying or being born say nothing."""
        asked = [self._cast.worker(index).workload.remote() for index in self._cast.worker_indices]
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=1.0) if asked else ([], [])
        readings = []
        for reference in done:
            try:
                readings.append(ray.get(reference))
            except ray.exceptions.RayActorError:
                continue
        return readings

    def _roll_out(self, index: int) -> None:
        self._runs[self._cast.worker(index).run.remote()] = index

    def _ended(self, run: Any, *, closing: bool = False) -> None:
        """A worker's `run` returned or failed. One that was drained is let go, one that was lost is replaced, even at
        the end: other phases follow."""
        index = self._runs.pop(run)
        try:
            ray.get(run)
            if not closing:
                self._cast.stop_worker(index)
        except WORKER_LOST as error:
            self._count_death(f"rollout worker {index}", error)
            self._replace(index, error)

    def _replace(self, index: int, error: Exception) -> None:
        self._cast.stop_worker(index)
        ray.get(self._cast.store.release.remote(index, f"its worker was lost ({type(error).__name__})"))
        if self._cast.has_place(index, patience_s=PLACE_PATIENCE_S) or not self._cast.workers:
            self._start(index)
        else:
            self._note(f"going on without rollout worker {index} until the cluster has room for it")

    def _tend(self) -> None:
        """Now and then: replace workers that do not follow the policy, start those that the run may have and there is
        room for by now, let go of those that it may not have any more."""
        if time.monotonic() - self._tended_at < TEND_EVERY_S:
            return
        self._tended_at = time.monotonic()
        for index in ray.get(self._cast.store.overdue.remote(PROOF_PATIENCE_S)):
            self._give_up(index)
        wanted = self._num_wanted()
        for missing in [index for index in range(wanted) if index not in self._cast.worker_indices]:
            if self._cast.has_place(missing):
                self._start(missing)
                self._note(f"rollout worker {missing} joined")
        self._cast.forget_places(wanted)
        for index in self._cast.worker_indices[wanted:]:
            self._cast.worker(index).drain.remote()

    def _num_wanted(self) -> int:
        """What the recipe says, or the number that somebody wrote into the run's `workers` file meanwhile."""
        try:
            return max(1, int(self._wanted_file.read_text()))
        except (OSError, ValueError):
            return self._num_workers

    def _give_up(self, index: int) -> None:
        """Replace a worker that lives and yet does not take up new weights."""
        for run in [run for run, one in self._runs.items() if one == index]:
            del self._runs[run]
        error = AdapterMismatchError(f"it proved no new weights for {PROOF_PATIENCE_S:.0f} s")
        self._count_death(f"rollout worker {index}", error)
        self._replace(index, error)

    def _start(self, index: int) -> None:
        """Raises NoRoomError."""
        self._cast.start_worker(index)
        self._roll_out(index)

    def _count_death(self, part: str, error: Exception) -> None:
        reason = str(getattr(error, "cause", error)).strip().splitlines()[0][:200]
        self._deaths.append(f"{part}: {reason}")
        self.num_restarts += 1
        self._note(f"the {part} was lost and is replaced ({reason})")
        if len(self._deaths) > MAX_DEATHS:
            raise CrashLoopError(
                f"{len(self._deaths)} parts died since the last train step (bound {MAX_DEATHS}): "
                f"{'; '.join(self._deaths[-3:])}; read the actors' logs, mend the cause and "
                f"go on with `agentflow resume {shlex.quote(str(self._folder))}`"
            ) from error
