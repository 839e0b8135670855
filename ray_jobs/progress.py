"""What the RL loop adds up while it runs."""

from dataclasses import dataclass, field
from typing import Any

import ray

from actors.buffer import BatchRefs
from learner.types import StepResult
from ray_jobs.cast import Cast
from reward.statistics import RolloutStatistics
from rollout.buffer import GroupCounts


@dataclass(slots=True)
class TrainingTotals:
    """Sums over the train steps so far; `finish` adds what only the actors know."""

    num_steps: int = 0
    policy_version: int = 0
    staleness: list[float] = field(default_factory=list)
    packed_tokens: float = 0.0
    learner_s: float = 0.0
    waited_s: float = 0.0
    logprob_gap_version0: float | None = None
    counts: GroupCounts = field(default_factory=GroupCounts)
    rollouts: RolloutStatistics = field(default_factory=RolloutStatistics)
    versions_published: int = 0
    versions_acked: int = 0
    progress_fields: dict[str, Any] = field(default_factory=dict)

    def add(self, batch: BatchRefs, result: StepResult, *, waited_s: float, step_s: float) -> dict[str, float]:
        """Take a step in; returns its metrics under their stable names."""
        metrics = {
            **batch.statistics.metrics(),
            **result.metrics,
            "groups/drawn": float(batch.counts.drawn),
            "groups/all_right": float(batch.counts.all_right),
            "groups/all_wrong": float(batch.counts.all_wrong),
            "groups/failed": float(batch.counts.failed),
            "rollout/groups_kept_share": self._kept_share(batch.counts),
            "learner/wait_s": waited_s,
            "time/step_s": step_s,
        }
        if self.num_steps == 0:
            # The first batch was sampled by version 0 and is scored by version 0: any gap is numerical.
            self.logprob_gap_version0 = result.metrics["policy/logprob_gap_abs"]
            metrics["policy/logprob_gap_version0"] = self.logprob_gap_version0
        self.num_steps += 1
        self.policy_version = result.policy_version
        self.staleness.append(result.metrics["policy/staleness_max"])
        self.packed_tokens += result.metrics["learner/packed_tokens"]
        self.learner_s += result.metrics["learner/step_s"]
        self.waited_s += waited_s
        self.counts = batch.counts
        self.progress_fields = {
            "solve_rate": metrics["rollout/solve_rate"],
            "kept": metrics["rollout/groups_kept_share"],
            "staleness": metrics["policy/staleness_max"],
            "step_s": step_s,
        }
        return metrics

    def finish(self, cast: Cast) -> None:
        self.counts, self.rollouts = ray.get(cast.buffer.totals.remote())
        self.versions_published, self.versions_acked = ray.get(cast.weights.counts.remote())

    def _kept_share(self, counts: GroupCounts) -> float:
        """Of the groups that ended since the step before, the share with signal."""
        kept = (counts.ready + counts.in_batch + counts.trained) - (
            self.counts.ready + self.counts.in_batch + self.counts.trained
        )
        ended = kept + (counts.filtered + counts.failed) - (self.counts.filtered + self.counts.failed)
        return kept / ended if ended else 0.0
