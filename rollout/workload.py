"""A worker's load: how many groups it may run, and what it spent its time on."""

import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from configs.rollout import RolloutConfig
from rollout.concurrency import ConcurrencyControl
from rollout.engine import EngineLoad

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReading:
    """Seconds since the reading before: in all, waiting for admission with places free, engine computing. And the
    places that the cache allows, and how many of them were taken at the time of reading."""

    worker: int
    elapsed_s: float
    admission_wait_s: float
    engine_busy_s: float
    places: int
    running: int


class Workload:
    """At depth 0 the places never change: what runs together decides the last bits of what is sampled."""

    def __init__(self, config: RolloutConfig, *, pipeline_depth: int) -> None:
        most = max(1, 2 * config.engine.max_num_seqs // config.group_size)
        least = most if pipeline_depth == 0 else 1
        # Asked about twice per group, so a turnover of all places is about so many questions.
        self._control = ConcurrencyControl(most, least, turnover=2 * most)
        self._read_at = time.monotonic()
        self._busy_before = 0.0
        self._waited_s = 0.0
        self.num_places = most

    def places(self, load: EngineLoad, running: int) -> int:
        """Groups that may run now."""
        self.num_places = self._control.observe(
            kv_usage=load.kv_usage, num_preemptions=load.num_preemptions, num_waiting=load.num_waiting, running=running
        )
        return self.num_places

    async def waiting(self, answer: Awaitable[Answer]) -> Answer:
        """The answer; the time that it took counts as waiting for admission."""
        started = time.monotonic()
        try:
            return await answer
        finally:
            self._waited_s += time.monotonic() - started

    def reading(self, worker: int, busy_s: float, running: int) -> WorkerReading:
        """What was since the call before."""
        now = time.monotonic()
        reading = WorkerReading(
            worker=worker,
            elapsed_s=now - self._read_at,
            admission_wait_s=self._waited_s,
            engine_busy_s=busy_s - self._busy_before,
            places=self.num_places,
            running=running,
        )
        self._read_at, self._busy_before, self._waited_s = now, busy_s, 0.0
        return reading
