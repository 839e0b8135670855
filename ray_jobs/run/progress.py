"""The totals of the RL loop, computed from the rows of metrics.jsonl, so that a resumed run has them too."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import ray

from actors.cluster import Handle
from configs.reward import OutcomeGatedConfig
from configs.run import RunConfig
from envs.datasets.families import FAMILIES
from learner.types import StepResult
from ray_jobs.run.metrics import (
    Limit,
    StepTimes,
    average_shares,
    limit_of,
    shares_of_step,
    verdict,
    verdict_metrics,
)
from reward.prm.alarms import Alarm, HackingMonitor
from reward.statistics import rollout_metrics
from rollout.concurrency import WorkerReading
from rollout.lifecycle import Batch, Totals

VERDICT_WINDOW = 3
"""Train steps over which the shown verdict is averaged, because single steps vary."""


def step_metrics(
    batch: Batch, result: StepResult, times: StepTimes, readings: Sequence[WorkerReading]
) -> dict[str, float]:
    """Return the metrics of a train step by name."""
    counts, facts = batch.counts, batch.facts
    shares = shares_of_step(times, facts, readings)
    num_groups = sum(batch.families.values())
    return {
        **rollout_metrics(facts),
        **result.metrics,
        **batch.bias,
        **{f"groups/{name}": float(value) for name, value in asdict(counts).items()},
        **({"rollout/groups_kept_share": facts.get("kept", 0.0) / facts["groups"]} if facts.get("groups") else {}),
        **{f"mix/{name}": num / num_groups for name, num in batch.families.items() if num_groups and name in FAMILIES},
        **{f"solved/{name}": rate for name, rate in batch.solved.items() if name in FAMILIES},
        "learner/wait_s": times.wait_s,
        "learner/publish_s": times.publish_s,
        "time/step_s": times.step_s,
        **verdict_metrics(shares),
    }


def lost_rows(rows: Iterable[Mapping[str, float]], num_steps: int) -> str | None:
    """Return a message if metrics.jsonl has no row of some train step before the checkpoint; None if it has all."""
    missing = sorted({*range(1, num_steps + 1)} - {int(row["step"]) for row in rows})
    if not missing:
        return None
    return (
        f"metrics.jsonl has lost {len(missing)} of the {num_steps} train steps that the checkpoint knows (first: step "
        f"{missing[0]}); they are not repeated, and the curves have a gap"
    )


@dataclass(slots=True)
class Training:
    """The metrics of the train steps so far, and the monitor that raises alarms."""

    monitor: HackingMonitor
    scored: bool
    """Whether planner steps are scored by a PRM, which the monitor watches."""
    num_steps: int = 0
    """Train steps of the current weights; `rows` may lack some that were lost."""
    rows: list[Mapping[str, float]] = field(default_factory=list)
    reported: Limit | None = None
    """The limit that `news` reported last."""

    @classmethod
    def of(cls, config: RunConfig, rows: Iterable[Mapping[str, float]], *, num_steps: int, scored: bool) -> "Training":
        """Return the training as if these rows had been added one by one, with `num_steps` train steps behind it."""
        gated = config.reward.gated or OutcomeGatedConfig()
        training = cls(monitor=HackingMonitor(gated.alarm_window, gated.prm_weight), scored=scored)
        for row in rows:
            training.num_steps = int(row["step"]) - 1
            training.add(row)
        training.num_steps = num_steps
        return training

    @property
    def logprob_gap_version0(self) -> float | None:
        """Return the mean absolute gap between engine and learner log-probs of choice tokens in the first batch.

        The same version sampled and scored that batch, so any gap is numerical. None if its row was lost.
        """
        return next((row["policy/logprob_gap_abs"] for row in self.rows[:1] if row["step"] == 1), None)

    def add(self, row: Mapping[str, float]) -> list[Alarm]:
        """Add a train step; return the alarms that it raised."""
        self.num_steps += 1
        self.rows.append({**row, "step": self.num_steps})
        return self.monitor.observe(self.num_steps, row) if self.scored else []

    @property
    def progress_fields(self) -> dict[str, float | str]:
        shown = {
            "solve_rate": "rollout/solve_rate",
            "kept": "rollout/groups_kept_share",
            "staleness": "policy/staleness_max",
            "step_s": "time/step_s",
        }
        last = self.rows[-1]
        limit = limit_of(average_shares(self.rows[-VERDICT_WINDOW:])).replace("_", " ")
        return {field: last[metric] for field, metric in shown.items() if metric in last} | {"limit": limit}

    def news(self) -> str | None:
        """Return the verdict on speed if two windows in a row agree on a limit that was not reported last."""
        if len(self.rows) <= VERDICT_WINDOW:
            return None
        now = average_shares(self.rows[-VERDICT_WINDOW:])
        limit = limit_of(now)
        if limit != limit_of(average_shares(self.rows[-VERDICT_WINDOW - 1 : -1])) or limit == self.reported:
            return None
        self.reported = limit
        return f"speed: {verdict(now)}"

    def facts(self, store: Handle, num_restarts: int) -> dict[str, object]:
        """Return the numbers of the RL phase."""
        totals: Totals = ray.get(store.totals.remote())
        counts = totals.counts
        acknowledged = ray.get(store.acknowledgements.remote())
        staleness = [row["policy/staleness_max"] for row in self.rows]
        latencies = sorted(acknowledged.latencies_s)
        watched = {
            "prm_weight_at_end": self.monitor.prm_weight,
            "alarms": [asdict(alarm) for alarm in self.monitor.alarms],
        }
        return {
            "num_steps": self.num_steps,
            "num_trajectories": totals.facts.get("trajectories", 0),
            "sampled_tokens": totals.facts.get("sampled_tokens", 0),
            "packed_tokens": sum(row["learner/packed_tokens"] for row in self.rows),
            "learner_s": sum(row["learner/step_s"] for row in self.rows),
            "learner_wait_s": sum(row["learner/wait_s"] for row in self.rows),
            "staleness": {
                "mean": sum(row["policy/age_mean"] for row in self.rows) / max(len(self.rows), 1),
                "max": max(staleness, default=0.0),
            },
            "groups": {
                "drawn": counts.drawn,
                "trained": counts.trained,
                "refused": counts.refused,
                "filtered": counts.filtered,
                "failed": counts.failed,
                "expired": counts.expired,
                "lost": counts.lost,
                "live_at_end": counts.live,
                "requeued": totals.num_retries,
                "reasons": totals.reasons,
            },
            "versions_published": acknowledged.num_published,
            "versions_acked": acknowledged.num_acknowledged,
            "sync_s": {
                "median": latencies[len(latencies) // 2] if latencies else None,
                "max": max(latencies, default=None),
            },
            "restarts": num_restarts,
            "steps_skipped": int(sum(row["policy/skipped"] for row in self.rows)),
            "logprob_gap_version0": self.logprob_gap_version0,
            **(watched if self.scored else {}),
            "bottleneck": verdict(average_shares(self.rows)) if self.rows else None,
        }
