"""The rollout workers of the RL phase. One joins, leaves or is lost here and nowhere else: its process, its place in
the cluster, its groups in the ledger and its share of them change together."""

from typing import Any

import ray

from ray_jobs.cast import Cast
from rollout.casualties import Loss


class Crew:
    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self._runs: dict[Any, int] = {}
        self._prm_digest = cast.prm_digest

    @property
    def indices(self) -> tuple[int, ...]:
        return self._cast.worker_indices

    @property
    def runs(self) -> tuple[Any, ...]:
        """What ends when a worker ends, one reference for each that rolls out."""
        return tuple(self._runs)

    def roll_out(self, index: int) -> None:
        """Set to work one that is up, or will be."""
        self._runs[self._cast.worker(index).run.remote(self._prm_digest)] = index

    def join(self, index: int) -> None:
        """Start one for which the cluster has a place."""
        self._cast.start_worker(index)
        self.roll_out(index)

    def ended(self, run: Any) -> int:
        """Whose `run` this was, which has returned or failed."""
        return self._runs.pop(run)

    def part_from(self, index: int, reason: str) -> Loss:
        """End a worker, let go or lost; what it ran is run again."""
        self._runs = {run: one for run, one in self._runs.items() if one != index}
        self._cast.stop_worker(index)
        loss: Loss = ray.get(self._cast.store.release.remote(index, reason))
        return loss
