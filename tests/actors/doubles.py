"""Simulated parts that do what must never go unnoticed. What happens only once is remembered by a file."""

import asyncio
import hashlib
import json
import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.engines.engine import EngineError, Pulse
from tests.changed import replace
from tests.simulated_parts import SimulatedEngine, SimulatedLearner, SimulatedWorker

GATE = "gate"


def first_time(folder: Path, what: str) -> bool:
    """Whether no process asked this before."""
    try:
        (folder / f"once-{what}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def open_gate(folder: Path) -> None:
    (folder / GATE).touch()


def wait_at_gate(folder: Path) -> None:
    while not (folder / GATE).exists():
        time.sleep(0.05)


def events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What the parts noted, in the order of time."""
    rows = [json.loads(line) for path in folder.glob("events-*.jsonl") for line in path.open() if line.endswith("\n")]
    return sorted((row for row in rows if kind in (None, row["kind"])), key=lambda row: row["at"])


def note(folder: Path, kind: str, **facts: Any) -> None:
    row = {"kind": kind, "pid": os.getpid(), "at": time.time(), **facts}
    with (folder / f"events-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def is_task_3(task) -> bool:
    """Whether it is the fourth task. Those that show a number of a held-out one are drawn again, higher up."""
    return int(task.id.rpartition("-")[2]) % 10**9 == 3


class WatchedWorker(SimulatedWorker):
    """Notes when groups begin and end."""

    def __init__(self, index: int, *, folder: Path, **options: Any) -> None:
        super().__init__(index, **options)
        self.folder = folder

    async def run_group(self, task, group_id, group_size, hints=""):
        self._note("begin", group_id)
        await self.meet_fault(task)
        group = await super().run_group(task, group_id, group_size)
        self._note("end", group_id)
        return group

    async def meet_fault(self, task) -> None:
        """None here."""

    def _note(self, kind: str, group_id: str) -> None:
        group = int(group_id[1:])
        note(self.folder, kind, worker=self.index, group=group, version=self.engine.policy_version)


class GatedWorker(WatchedWorker):
    """Its groups do not go on before the gate is open."""

    async def meet_fault(self, task):
        await asyncio.to_thread(wait_at_gate, self.folder)


class PoisonedWorker(WatchedWorker):
    """One task raises whenever it is run."""

    async def meet_fault(self, task):
        if is_task_3(task):
            raise ValueError("no agent survives this question")


class KilledWorker(WatchedWorker):
    """One task ends the process of whoever runs it."""

    async def meet_fault(self, task):
        if is_task_3(task):
            os._exit(1)


class BrokenEngineWorker(WatchedWorker):
    """Its engine breaks during the first group ever."""

    async def meet_fault(self, task):
        if first_time(self.folder, "broken engine"):
            self.engine.failure = RuntimeError("the engine ran out of memory")


class WatchedEngine(SimulatedEngine):
    """What goes wrong, goes wrong once: in the first process that loads this version."""

    def __init__(self, folder: Path, from_version: int) -> None:
        super().__init__()
        self.folder = folder
        self.from_version = from_version

    def meets_fault(self, version: int) -> bool:
        if version < self.from_version or not first_time(self.folder, "fault of an engine"):
            return False
        note(self.folder, "fault", version=version)
        return True


class UnloadableEngine(WatchedEngine):
    """Breaks over an adapter."""

    async def take_up(self, version, adapter):
        if self.meets_fault(version):
            self.failure = RuntimeError("the engine ran out of memory")
            raise EngineError("the engine stopped")
        return await super().take_up(version, adapter)


class MutatingEngine(WatchedEngine):
    """Gets other bytes than were published."""

    async def take_up(self, version, adapter):
        if self.meets_fault(version):
            adapter = adapter[:-1] + bytes([adapter[-1] ^ 1])
        return await super().take_up(version, adapter)


class StaleEngine(WatchedEngine):
    """Takes a new version up in name only: its memory holds the weights from before."""

    async def take_up(self, version, adapter):
        before = self.adapter
        digest = await super().take_up(version, adapter)
        if self.meets_fault(version):
            self.adapter, self.memory = before, (adapter, before or b"")
        return digest


class HangingEngine(WatchedEngine):
    """Never answers."""

    async def take_up(self, version, adapter):
        if self.meets_fault(version):
            await asyncio.Event().wait()
        return await super().take_up(version, adapter)


class SleepingEngine(WatchedEngine):
    """Its thread hangs over a request that is open, while the worker around it goes on."""

    async def take_up(self, version, adapter):
        digest = await super().take_up(version, adapter)
        if self.meets_fault(version):
            self.asleep = True
        return digest

    async def pulse(self):
        return Pulse(done=7, num_open=1) if getattr(self, "asleep", False) else Pulse()


class WaitingWorker(WatchedWorker):
    """Its groups wait for an engine that sleeps."""

    async def meet_fault(self, task):
        if getattr(self.engine, "asleep", False):
            await asyncio.Event().wait()


def worker_with(engine: type[WatchedEngine], index: int, *, folder: Path, from_version: int = 2) -> WatchedWorker:
    return WaitingWorker(index, folder=folder, engine=engine(folder, from_version))


class RoundWorker(WatchedWorker):
    """What it samples depends on the weights, and on how many groups are sampled together."""

    def begin_round(self, num_groups):
        self.together = num_groups

    async def _play(self, task, trajectory_id, **how):
        drawn = f"{trajectory_id}|{self.together}|{hashlib.sha256(self.engine.adapter).hexdigest()}"
        played = await super()._play(task, drawn, **how)
        return replace(played, id=trajectory_id, group_id=trajectory_id.rpartition("/")[0])


class RememberingLearner(SimulatedLearner):
    """Its weights and its optimizer keep a trace of all that it was trained on, in order."""

    def reset_optimizer(self, learning_rate, warmup_steps=0, num_steps=None):
        self._torch.manual_seed(0)
        super().reset_optimizer(learning_rate, warmup_steps, num_steps)
        self._trace = self._torch.nn.Parameter(self._torch.zeros(8))
        self.optimizer.add_param_group({"params": [self._trace], "lr": 0.5, "momentum": 0.9})

    def train_step(self, batch):
        seen = repr([(sample.trajectory_id, sample.token_ids) for sample in samples_of(batch)])
        self._trace.grad = self._torch.tensor([float(byte) for byte in hashlib.sha256(seen.encode()).digest()[:8]])
        return super().train_step(batch)

    def adapter(self, precision="float32"):
        plain, trace = super().adapter(precision), self._trace.detach().numpy().tobytes()
        data = plain.data + trace
        return replace(plain, data=data, digest=hashlib.sha256(data).hexdigest())

    def load_adapter(self, adapter):
        super().load_adapter(adapter)
        with self._torch.no_grad():
            self._trace.copy_(self._torch.tensor(array("f", adapter.data[4 * len(self._weights) :])))


class GatedLearner(SimulatedLearner):
    """Waits at the gate in one train step, the first time."""

    def __init__(self, *, folder: Path, step: int, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder
        self.step = step

    def train_step(self, batch):
        groups = sorted({sample.trajectory_id.partition("/")[0] for sample in samples_of(batch)})
        note(self.folder, "train", step=self.num_steps_done + 1, groups=groups)
        if self.num_steps_done + 1 == self.step and first_time(self.folder, f"step {self.step}"):
            note(self.folder, "gated")
            wait_at_gate(self.folder)
        return super().train_step(batch)


def samples_of(batch) -> Iterator[Any]:
    return (sample for microbatch in batch.microbatches for sample in microbatch)


class DyingInAttemptWorker(WatchedWorker):
    """Notes when the attempts of an evaluation begin. Its process ends over the third of them, or the fourth, once."""

    async def attempt(self, task, trajectory_id, **options):
        note(self.folder, "attempt", task=task.id, phase=options["group_id"], version=self.engine.policy_version)
        group = await SimulatedWorker.run_group(self, task, trajectory_id, 2)
        if len(events(self.folder, "attempt")) >= 3 and first_time(self.folder, "death"):
            self.die()
        (attempt, _) = group.trajectories
        return replace(attempt, stop_reason="infrastructure") if self.engine.failure else attempt

    def die(self):
        os._exit(1)


class EngineDyingInAttemptWorker(DyingInAttemptWorker):
    """The same, but only its engine ends, so that attempts are unscored from then on."""

    def die(self):
        self.engine.failure = RuntimeError("the engine ran out of memory")
