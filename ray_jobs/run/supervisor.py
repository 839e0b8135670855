"""Keeps the rollouts of the RL loop going: in it workers join, leave and are replaced here and nowhere else."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import ray

from actors.cluster import PART_LOST, reason_of
from actors.learner import LearnerCalls
from configs.rollout import FolderMemoryConfig
from ray_jobs.run.actors import in_words
from ray_jobs.run.deaths import Death
from ray_jobs.run.rollouts import WORKER_LOST, PinnedRollouts
from ray_jobs.run.run import Run
from rollout.concurrency import WorkerReading
from rollout.store.adapters import AdapterMismatchError

Takes = ParamSpec("Takes")
Result = TypeVar("Result")
RunRef: TypeAlias = "ray.ObjectRef[None]"
AnyRef: TypeAlias = "ray.ObjectRef[Any]"

LOOK_AROUND_S = 2.0
FILL_EVERY_S = 0.5
"""How often a place is asked for that a lost worker had, while it may soon be free."""
TEND_EVERY_S = 5.0
PLACE_PATIENCE_S = 5.0
"""The room that a dead worker had is free again within that, unless its machine went with it."""
PROOF_PATIENCE_S = 300.0
"""A worker that has not proven a version so long after its publication is replaced."""


class WantedWorkers:
    """How many workers a run shall have: the number in its `workers` file, which anybody may change at any time, and
    `default` where there is no such file. `most`, where the recipe allows no more."""

    def __init__(self, path: Path, default: int, note: Callable[[str], None], *, most: int | None = None) -> None:
        self._path = path
        self._most = most
        self._default = default
        self._note = note
        self._num = default
        self._text = ""

    def read(self) -> int:
        """The number of now. What is not a whole number of at least 1, or more than may be, changes nothing and is told
        once. A file that cannot be read changes nothing either, nor does an empty one, which somebody is about to
        write."""
        try:
            text = self._path.read_text(errors="replace").strip()
        except FileNotFoundError:
            self._num, self._text = self._default, ""
            return self._num
        except OSError:
            return self._num
        if text and text != self._text:
            self._text = text
            self._num = self._parsed(text)
        return self._num

    def _parsed(self, text: str) -> int:
        with suppress(ValueError):
            num = int(text)
            if self._most is not None and num > self._most:
                self._note(
                    f"{self._path} says {num}, and agent.memory.type = 'folder' is for {self._most} rollout worker: "
                    f"{self._num} as before; a run with agent.memory.type=server may have more"
                )
                return self._num
            if num >= 1:
                return num
        self._note(f"{self._path} says {text[:40]!r}, not a whole number of at least 1: {self._num} workers as before")
        return self._num


class LearnerLostError(RuntimeError):
    """The learner died; its weights since the newest checkpoint are gone."""


class Supervisor(AbstractContextManager["Supervisor"]):
    """While it is open, workers roll out. What takes long, a batch, a step or an evaluation, the loop waits for through
    `get`, `learn` and `beside`, so that workers that die meanwhile are replaced."""

    def __init__(self, run: Run) -> None:
        self._actors = run.actors
        self._prm_digest = run.actors.prm_digest
        self._runs: dict[RunRef, int] = {}
        """Of each worker that rolls out the call that ends when it ends."""
        self._deaths = run.actors.watch.deaths
        self._watch = run.actors.watch
        self._waiting = run.console.waiting
        self._note = run.console.note
        config = run.config.rollout
        self._patience_s = run.config.cluster.patience_s
        num_workers = max(config.num_workers, config.max_workers or 0)
        most = 1 if isinstance(run.config.planner.memory, FolderMemoryConfig) else None
        self._wanted = WantedWorkers(run.folder.wanted_workers, num_workers, self._note, most=most)
        self._tended_at = time.monotonic()
        self._lost_at: dict[int, float] = {}
        self._given_up: set[int] = set()
        """Lost workers that the run goes on without until there is room."""

    def __enter__(self) -> "Supervisor":
        for index in self._actors.worker_indices:
            self._roll_out(index)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._actors.release_unused(0)
        with self._waiting("the rollout workers to end"):
            while exc is None and (self._runs or self._hopes()):
                # Again each time: a store that was killed meanwhile has forgotten it.
                ray.get(self._actors.store.close.remote())
                self._replace_lost()
                for run in self._ended_runs(tuple(self._runs)):
                    self._ended(run, closing=True)
        self._actors.release_unused(0)

    def learn(
        self, method: Callable[Concatenate[LearnerCalls, Takes], Result], *args: Takes.args, **kwargs: Takes.kwargs
    ) -> Result:
        """What a method of the learner returns. Raises LearnerLostError when the learner dies over it."""
        learner, what = self._actors.learner, in_words(method)
        with self._watch.call("learner", learner, what):
            reference = self._actors.learner_call(method, *args, **kwargs)
            self._wait_for(reference, f"the learner's {what}")
            try:
                return self._value(reference)
            except PART_LOST as error:
                raise LearnerLostError(str(error)) from error

    def get(self, reference: "ray.ObjectRef[Result]", what: str) -> Result:
        """The value of `reference`; `what` it is, in words. Workers that die meanwhile are replaced, and new ones join.
        Raises what the call raises."""
        self._wait_for(reference, what)
        return self._value(reference)

    def _wait_for(self, reference: AnyRef, what: str) -> None:
        with self._waiting(what):
            while True:
                self._tend()
                done = self._ended_runs((reference, *self._runs))
                if reference in done:
                    return
                for run in done:
                    self._ended(run)

    def beside(self, policy: PinnedRollouts, work: Callable[[], Result], what: str) -> Result:
        """What `work` returns, which asks `policy` from a thread of its own; workers are cared for meanwhile as in
        `get`. Raises what `work` raises, and what ends the loop."""
        with self._waiting(what), ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluation") as thread:
            done = thread.submit(work)
            try:
                while wait([done], timeout=FILL_EVERY_S).not_done:
                    self._tend()
                    for run in self._ended_runs(tuple(self._runs), patience_s=0.0):
                        self._ended(run)
            except BaseException as error:
                # The thread is waited for, and might wait for a worker that nobody replaces now.
                policy.end(error)
                raise
            return done.result()

    def _roll_out(self, index: int) -> None:
        """Set to work one that is up, or will be."""
        self._runs[self._actors.worker(index).run.remote(self._prm_digest)] = index

    def _join(self, index: int) -> None:
        """Start one for which the cluster has a place."""
        self._actors.start_worker(index)
        self._roll_out(index)

    def _value(self, reference: "ray.ObjectRef[Result]") -> Result:
        try:
            return ray.get(reference)
        except PART_LOST:
            self._deaths.check()
            raise

    def progressed(self) -> None:
        """A train step ended: what died before it did no lasting harm."""
        self._deaths.progressed()

    def replace_learner(self, error: Exception) -> None:
        """Start another learner in the place of one that died."""
        self._count(Death(part="learner", reason=self._watch.why("learner") or reason_of(error)))
        self._actors.restart_learner()

    def readings(self) -> list[WorkerReading]:
        """What the workers did since they were asked last; those that are busy dying or being born say nothing."""
        asked = [self._actors.worker(index).workload.remote() for index in self._actors.worker_indices]
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=1.0) if asked else ([], [])
        readings = []
        for reference in done:
            try:
                readings.append(ray.get(reference))
            except PART_LOST:
                continue
        return readings

    def _ended_runs(self, references: tuple[AnyRef, ...], patience_s: float | None = None) -> list[AnyRef]:
        """Those that are done after a while, at most one if others are not."""
        if patience_s is None:
            patience_s = FILL_EVERY_S if self._hopes() else LOOK_AROUND_S
        if not references:
            time.sleep(patience_s)
            return []
        done, _ = ray.wait(list(references), num_returns=1, timeout=patience_s)
        return list(done)

    def _ended(self, run: RunRef, *, closing: bool = False) -> None:
        """A worker's `run` returned or failed. One that was drained is let go, one that was lost is replaced, even at
        the end: other phases follow."""
        index = self._runs.pop(run)
        try:
            ray.get(run)
        except WORKER_LOST as error:
            self._lost(index, error)
        else:
            if not closing:
                self._actors.part_from(index, "its worker was let go")

    def _lost(self, index: int, error: Exception) -> None:
        """A worker died, or is given up; it is replaced as soon as there is a place."""
        self._runs = {run: one for run, one in self._runs.items() if one != index}
        self._count(self._actors.lose_worker(index, error))
        self._lost_at[index] = time.monotonic()
        self._replace_lost()

    def _replace_lost(self) -> None:
        """Start the workers in whose place there is room. The others are waited for a little all together, and then
        the run goes on without them, if there are any. Raises NoRoomError."""
        wanted = self._wanted.read()
        self._lost_at = {index: at for index, at in self._lost_at.items() if index < wanted}
        self._actors.reserve(self._lost_at)
        for index in self._actors.reserved(self._lost_at):
            del self._lost_at[index]
            self._join(index)
            if index in self._given_up:
                self._given_up.remove(index)
                self._note(f"rollout worker {index} joined")
        now = time.monotonic()
        for index, at in self._lost_at.items():
            if not self._actors.worker_indices and now - at > self._patience_s:
                raise self._actors.no_room(index)
            if self._actors.worker_indices and index not in self._given_up and now - at > PLACE_PATIENCE_S:
                self._given_up.add(index)
                self._note(f"going on without rollout worker {index} until the cluster has room for it")

    def _hopes(self) -> bool:
        """Whether a lost worker may be back in a moment."""
        return any(index not in self._given_up for index in self._lost_at)

    def _tend(self) -> None:
        """Now and then: replace workers that do not follow the policy, start those that the run may have and there is
        room for by now, let go of those that it may not have any more. Raises BaseLostError."""
        if self._hopes():
            self._replace_lost()
        if time.monotonic() - self._tended_at < TEND_EVERY_S:
            return
        self._tended_at = time.monotonic()
        self._actors.check_base()
        for index in ray.get(self._actors.store.roll_call.remote(self._actors.worker_indices, PROOF_PATIENCE_S)):
            self._lost(index, AdapterMismatchError(f"it proved no new weights for {PROOF_PATIENCE_S:.0f} s"))
        self._replace_lost()
        wanted = self._wanted.read()
        missing = [index for index in range(wanted) if index not in {*self._actors.worker_indices, *self._lost_at}]
        self._actors.reserve(missing)
        for index in self._actors.reserved(missing):
            self._join(index)
            self._note(f"rollout worker {index} joined")
        self._actors.release_unused(wanted)
        for index in self._actors.worker_indices:
            if index >= wanted:
                self._actors.worker(index).drain.remote()

    def _count(self, death: Death) -> None:
        self._note(death.news)
        self._deaths.add(death)
