"""Supervision of a run's actors, in every phase: lost or hung parts are replaced here and nowhere else.

    part            how a loss is noticed                                what happens
    rollout worker  its process ends, its heartbeat hangs, or its        replaced (`_replace_workers`); its groups
                    engine cannot prove the newest weights               are drawn again
    PRM             its process ends, or its heartbeat hangs             replaced (`_replace_prm`)
    learner         its process ends, or a call exceeds its limit        LearnerLostError; the loop calls
                                                                         `restart_learner` and loads a checkpoint
    sampling, base  its process ends, or its heartbeat hangs             the run ends with CutOffError

A thread looks at all parts once a second. A part that is lost more than MAX_RESTARTS times within one train step ends
the run.
"""

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from actors.cluster import PART_LOST, CutOffError, Handle, LearnerLostError, is_lost, reason_of
from actors.heartbeat import Bound, Heartbeat
from actors.launch import Cluster, Launcher, worker_bundle
from actors.learner import call_all
from configs.errors import UserError
from configs.plugins import OwnCodeError
from configs.rollout import FolderMemoryConfig
from configs.run import RunConfig
from rollout.concurrency import WorkerReading
from rollout.lifecycle import GroupCounts

Result = TypeVar("Result")

MAX_RESTARTS = 5
"""Restarts of one part between two train steps."""
LOOK_EVERY_S = 1.0
LONGEST_TICK_S = 5.0
"""Time in which the driver itself was stopped counts for no part."""
ROOM_WAIT_S = 5.0
"""A dead worker's room is free again within this time, unless its node was lost."""
GRACE_S = 15.0
"""Time that the other ranks get after one has failed: a rank that dies makes the others fail as well."""


@dataclass(slots=True, kw_only=True)
class Part:
    """An actor that is watched."""

    name: str
    actor: Handle
    lost: "ray.ObjectRef[None]"
    """A call that fails when the actor's process ends or can no longer be used."""
    heartbeat: Heartbeat
    node: str = ""
    run: "ray.ObjectRef[None] | None" = None
    """A rollout worker's call that ends when it stops rolling out."""

    def look(self, tick: float) -> str | None:
        """Return why the part is lost; None while it works. Raises OwnCodeError, as the code would fail everywhere."""
        self.heartbeat.look(tick)
        if self.heartbeat.waited_s > self.heartbeat.limit_s:
            return f"it {self.heartbeat}"
        for call in filter(None, (self.lost, self.run)):
            if ray.wait([call], timeout=0)[0]:
                try:
                    ray.get(call)
                except OwnCodeError as error:
                    raise OwnCodeError(reason_of(error)) from error
                except Exception as error:
                    return reason_of(error)
        return None


class Supervisor:
    """Watches and replaces the parts of a run while it is open. Calls that wait raise what ends the run."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        launcher: Launcher,
        cluster: Cluster,
        *,
        note: Callable[[str], None],
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Take over a launched cluster."""
        self._config = config
        self._launcher = launcher
        self._note = note
        self._waiting = waiting
        self.num_restarts = 0
        self.sampling = cluster.sampling
        self.learner = cluster.learner
        self._limits: dict[str, Bound] = {}
        """Time limits of the learner's calls, by method."""
        self._restarts: Counter[str] = Counter()
        self._failure: Exception | None = None
        """What ends the run."""
        limits = config.cluster
        self._fixed = [self._part("dynamic sampling", cluster.sampling, floor_s=limits.answer_s)]
        if cluster.base is not None:
            self._fixed.append(self._part("holder of the base weights", cluster.base, floor_s=limits.work_s))
        self._prm = self._part("PRM", cluster.prm, floor_s=limits.work_s) if cluster.prm is not None else None
        self._workers = {index: self._worker_part(index, *started) for index, started in cluster.workers.items()}
        self._missing: dict[int, float] = {}
        """Workers that have no room yet, with the time since when."""
        self._had_workers_at = time.monotonic()
        self._wanted = WantedWorkers(config, folder / "workers", note)
        self._rolling_out = False
        self._prm_digest: str | None = None
        self._lock = threading.Lock()
        """Held while the thread changes parts."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def __enter__(self) -> "Supervisor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    # --- what the driver calls -------------------------------------------------------------------

    @property
    def workers(self) -> dict[int, Handle]:
        """The rollout workers that have started, by index."""
        return {index: part.actor for index, part in tuple(self._workers.items()) if part.heartbeat.started}

    @property
    def prm(self) -> Handle | None:
        return self._prm.actor if self._prm else None

    def check(self) -> None:
        """Raise what ends the run, if there is anything."""
        if self._failure is not None:
            raise self._failure

    def wait(self, reference: "ray.ObjectRef[Result]", what: str) -> Result:
        """Return the value of a call. `what` names it on the console."""
        with self._waiting(what):
            while not ray.wait([reference], timeout=LOOK_EVERY_S)[0]:
                self.check()
        try:
            return ray.get(reference)
        except PART_LOST as error:
            raise self._unreplaceable(f"{what} failed: {reason_of(error)}") from error

    def learn(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the learner; return the first rank's result. Raise LearnerLostError if it dies or takes too long."""
        limits = self._config.cluster
        limit = self._limits.setdefault(method, Bound(floor_s=limits.work_s, first_s=limits.start_s))
        calls = call_all(self.learner, method, *args, **kwargs)
        pending, waited_s, failure, failed_at_s = calls, 0.0, None, 0.0
        with self._waiting(f"the learner's {method.replace('_', ' ')}"):
            while pending:
                started = time.monotonic()
                done, pending = ray.wait(pending, num_returns=1, timeout=LOOK_EVERY_S)
                waited_s += min(time.monotonic() - started, LONGEST_TICK_S)
                try:
                    ray.get(done)
                except Exception as error:
                    if is_lost(error):
                        self._kill_learner()
                        raise LearnerLostError(reason_of(error)) from error
                    failure, failed_at_s = failure or error, failed_at_s or waited_s
                if failure and waited_s > failed_at_s + GRACE_S:
                    # The other ranks wait for the failed one.
                    self._kill_learner()
                    break
                self.check()
                if waited_s > limit.seconds:
                    self._kill_learner()
                    raise LearnerLostError(f"its {method} took {waited_s:.0f} s (limit {limit.seconds:.0f} s)")
        if failure is not None:
            raise failure
        limit.observe(waited_s)
        return ray.get(calls[0])

    def sync(self, policy_version: int) -> None:
        """Wait until every worker uses this version of the weights or a newer one."""
        pending = [worker.reach.remote(policy_version) for worker in self.workers.values()]
        with self._waiting("every rollout worker to load the newest weights"):
            while pending:
                # A call that fails belongs to a worker that is being replaced.
                _, pending = ray.wait(pending, num_returns=1, timeout=LOOK_EVERY_S)
                self.check()

    def restart_learner(self, error: Exception) -> None:
        """Start another learner after the loss of this one, again if it is lost while it starts."""
        while True:
            self._count("learner", str(error))
            self.check()
            self._note(f"the learner was lost and is restarted ({error})")
            self._kill_learner()
            self.learner = self._launcher.start_learner()
            try:
                with self._waiting("the learner to restart"):
                    self._launcher.wait_for_learner()
                return
            except LearnerLostError as again:
                error = again

    @contextmanager
    def rolling_out(self, prm_digest: str | None) -> Iterator[None]:
        """Let the workers roll out, with a PRM of this digest, in the body; then wait until they have stopped."""
        with self._lock:
            self._rolling_out, self._prm_digest = True, prm_digest
            for part in self._workers.values():
                part.run = part.actor.run.remote(prm_digest)
        yield
        with self._lock:
            self._rolling_out = False
        with self._waiting("the rollout workers to stop"):
            ray.get(self.sampling.close.remote())
            while any(part.run is not None for part in tuple(self._workers.values())) or not self._workers:
                self.check()
                time.sleep(LOOK_EVERY_S / 4)

    def progressed(self) -> None:
        """Forget the restarts before this train step or phase: they did no lasting harm."""
        self._restarts.clear()

    def readings(self) -> list[WorkerReading]:
        """Return what each worker did since the last call; workers that are being replaced are left out."""
        calls = [worker.workload.remote() for worker in self.workers.values()]
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=1.0)
        readings = []
        for call in done:
            with suppress(*PART_LOST):
                readings.append(ray.get(call))
        return readings

    def situation(self) -> str:
        """Return clauses for the console: the groups that wait for a train step, and parts that are silent for 20 s."""
        groups = ""
        calls = [self.sampling.totals.remote()] if self._rolling_out else []
        for call in ray.wait(calls, timeout=1.0)[0] if calls else ():
            with suppress(*PART_LOST):
                counts: GroupCounts = ray.get(call).counts
                groups = f"; groups: {counts.ready} ready, {counts.filtered} without signal so far"
        parts = (*self._fixed, *filter(None, [self._prm]), *tuple(self._workers.values()))
        late = (f"; the {part.name} {part.heartbeat}" for part in parts if part.heartbeat.waited_s >= 20.0)
        return groups + "".join(late)

    # --- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        before, failed_looks = time.monotonic(), 0
        while not self._ending.wait(LOOK_EVERY_S):
            now = time.monotonic()
            tick, before = min(now - before, LONGEST_TICK_S), now
            try:
                with self._lock:
                    self._look(tick)
                failed_looks = 0
            except (UserError, *PART_LOST) as error:
                self._failure = self._failure or error
            except Exception as error:
                # The cluster itself may fail to answer for a while.
                logging.getLogger(__name__).warning("the supervisor could not look at the parts", exc_info=True)
                failed_looks += 1
                if failed_looks > 60:
                    self._failure = self._failure or error

    def _look(self, tick: float) -> None:
        """Look at every part once, and replace what is lost."""
        for part in self._fixed:
            if reason := part.look(tick):
                ray.kill(part.actor)
                hint = " or set card.share_base=false" if "base" in part.name else ""
                raise self._unreplaceable(f"the {part.name} was lost ({reason}){hint}")
        if self._prm and (reason := self._prm.look(tick)):
            self._replace_prm(reason)
        if lost := {index: reason for index, part in self._workers.items() if (reason := part.look(tick))}:
            self._replace_workers(lost)
        self._end_stopped_workers()
        if self._rolling_out:
            self._resize()
        self._start_missing_workers()

    def _replace_workers(self, lost: dict[int, str]) -> None:
        """End lost workers, so that `_start_missing_workers` replaces them; all those of a lost node are one loss."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for node in {self._workers[index].node for index in lost} - alive:
            indices = [index for index, part in self._workers.items() if part.node == node]
            self._note(f"node {node[:8]} was lost with the rollout workers {indices}, which are replaced")
            self._count(f"node {node[:8]}", "it was lost", num=len(indices))
            for index in indices:
                self._end_worker(index, "its node was lost")
                self._missing[index] = time.monotonic()
        for index in lost.keys() & self._workers.keys():
            name, reason = self._workers[index].name, lost[index]
            self._note(f"the {name} was lost and is replaced ({reason})")
            self._count(name, reason)
            self._end_worker(index, reason)
            self._missing[index] = time.monotonic()

    def _replace_prm(self, reason: str) -> None:
        """End a PRM that is lost or hangs, and give the workers another one."""
        assert self._prm is not None
        self._note(f"the PRM was lost and is restarted ({reason})")
        self._count("PRM", reason)
        ray.kill(self._prm.actor)
        self._prm = self._part("PRM", self._launcher.start_prm(), floor_s=self._config.cluster.work_s)
        if self._config.reward.prm is not None:
            for part in self._workers.values():
                part.actor.use_prm.remote(self._prm.actor)

    def _end_worker(self, index: int, reason: str) -> None:
        """Kill a worker; its groups are drawn again."""
        ray.kill(self._workers.pop(index).actor)
        self._launcher.free_worker(index)
        ray.wait([self.sampling.release.remote(index, reason)], timeout=30.0)

    def _end_stopped_workers(self) -> None:
        """Take note of workers whose `run` has returned: the phase ends, or they were drained."""
        for index, part in tuple(self._workers.items()):
            if part.run is not None and ray.wait([part.run], timeout=0)[0]:
                part.run = None
                if self._rolling_out and index >= self._wanted.num:
                    self._end_worker(index, "the run needs fewer workers")
                    self._note(f"rollout worker {index} left")

    def _resize(self) -> None:
        """Follow the number of workers in the run's `workers` file."""
        wanted = self._wanted.read()
        for index in range(wanted):
            if index not in self._workers and index not in self._missing:
                self._missing[index] = float("-inf")
        for index in [index for index in self._missing if index >= wanted]:
            del self._missing[index]
            self._launcher.free_worker(index)
        for index, part in self._workers.items():
            if index >= wanted:
                part.actor.drain.remote()

    def _start_missing_workers(self) -> None:
        """Start the workers for which there is room. The run continues without the others, if it has any."""
        self._launcher.reserve_workers(self._missing)
        for index in self._launcher.with_room(self._missing):
            since = self._missing.pop(index)
            prm = self.prm if self._config.reward.prm is not None else None
            part = self._worker_part(index, *self._launcher.start_worker(index, self.sampling, prm))
            if self._rolling_out:
                part.run = part.actor.run.remote(self._prm_digest)
            self._workers[index] = part
            if since == float("-inf"):
                self._note(f"rollout worker {index} joined")
        now = time.monotonic()
        if self._workers:
            self._had_workers_at = now
        elif now - self._had_workers_at > self._config.cluster.patience_s:
            raise self._launcher.no_room("rollout workers", [worker_bundle(self._config)])
        for index, since in self._missing.items():
            if self._workers and float("-inf") < since < now - ROOM_WAIT_S:
                self._missing[index] = float("-inf")
                self._note(f"continuing without rollout worker {index} until the cluster has room for it")

    # --- helpers ---------------------------------------------------------------------------------

    def _count(self, name: str, reason: str, *, num: int = 1) -> None:
        """Count restarts; a part that restarts too often ends the run."""
        self.num_restarts += num
        self._restarts[name] += 1
        if self._restarts[name] > MAX_RESTARTS:
            self._failure = self._failure or self._unreplaceable(
                f"the {name} was lost {self._restarts[name]} times since the last train step (limit {MAX_RESTARTS}), "
                f"the last time because: {reason}"
            )

    def _unreplaceable(self, what: str) -> CutOffError:
        return CutOffError(f"{what}; see the actors' logs")

    def _kill_learner(self) -> None:
        for rank in self.learner:
            ray.kill(rank)

    def _part(self, name: str, actor: Handle, *, floor_s: float, node: str = "") -> Part:
        heartbeat = Heartbeat(actor, floor_s=floor_s, start_s=self._config.cluster.start_s)
        return Part(name=name, actor=actor, lost=actor.until_lost.remote(), heartbeat=heartbeat, node=node)

    def _worker_part(self, index: int, actor: Handle, node: str) -> Part:
        return self._part(f"rollout worker {index}", actor, floor_s=self._config.cluster.answer_s, node=node)


class WantedWorkers:
    """The number of workers that a run shall have: that in its `workers` file, else the recipe's."""

    def __init__(self, config: RunConfig, path: Path, note: Callable[[str], None]) -> None:
        self._path = path
        self._note = note
        self._default = max(config.rollout.num_workers, config.rollout.max_workers or 0)
        self._most = 1 if isinstance(config.planner.memory, FolderMemoryConfig) else sys.maxsize
        self._text = ""
        self.num = self._default

    def read(self) -> int:
        """Return the current number. Text that is no valid number changes nothing, and is reported once."""
        try:
            text = self._path.read_text(errors="replace").strip()
        except FileNotFoundError:
            text = str(self._default)
        if text and text != self._text:
            self._text = text
            if text.isdecimal() and 1 <= int(text) <= self._most:
                self.num = int(text)
            else:
                only = " (agent.memory.type='folder' allows only 1)" if self._most == 1 else ""
                self._note(f"{self._path} has {text[:40]!r}, not a number from 1{only}; keeping {self.num} workers")
        return self.num
