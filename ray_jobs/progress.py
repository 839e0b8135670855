"""What the RL loop adds up while it runs."""

from dataclasses import asdict, dataclass, field
from typing import Any

import ray

from actors.buffer import BatchRefs
from learner.types import StepResult
from ray_jobs.cast import Cast
from reward.alarms import HackingMonitor
from rollout.buffer import GroupCounts


@dataclass(slots=True)
class TrainingTotals:
    """Sums over the train steps so far."""

    num_steps: int = 0
    policy_version: int = 0
    staleness: list[float] = field(default_factory=list)
    packed_tokens: float = 0.0
    learner_s: float = 0.0
    waited_s: float = 0.0
    logprob_gap_version0: float | None = None
    counts: GroupCounts = field(default_factory=GroupCounts)
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

    def facts(self, cast: Cast, monitor: HackingMonitor) -> dict[str, Any]:
        """The RL phase in numbers, with what only the actors know."""
        counts, rollouts = ray.get(cast.buffer.totals.remote())
        published, acked = ray.get(cast.weights.counts.remote())
        return {
            "num_steps": self.num_steps,
            "num_trajectories": rollouts.trajectories,
            "sampled_tokens": rollouts.sampled_tokens,
            "packed_tokens": self.packed_tokens,
            "learner_s": self.learner_s,
            "learner_wait_s": self.waited_s,
            "staleness": {
                "mean": sum(self.staleness) / max(len(self.staleness), 1),
                "max": max(self.staleness, default=0.0),
            },
            "groups": {
                "drawn": counts.drawn,
                "trained": counts.trained,
                "filtered": counts.filtered,
                "failed": counts.failed,
                "live_at_end": counts.outstanding,
            },
            "versions_published": published,
            "versions_acked": acked,
            "logprob_gap_version0": self.logprob_gap_version0,
            "prm_weight_at_end": monitor.prm_weight,
            "alarms": [asdict(alarm) for alarm in monitor.alarms],
        }

    def _kept_share(self, counts: GroupCounts) -> float:
        """Of the groups that ended since the step before, the share with signal."""
        kept = (counts.ready + counts.in_batch + counts.trained) - (
            self.counts.ready + self.counts.in_batch + self.counts.trained
        )
        ended = kept + (counts.filtered + counts.failed) - (self.counts.filtered + self.counts.failed)
        return kept / ended if ended else 0.0
