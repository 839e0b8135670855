"""What is logged of each train step, and the totals of the RL loop.

Totals are computed from the rows of metrics.jsonl, so that a resumed run has them too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean

import ray
from msgspec import structs

from actors.cluster import Handle
from configs.reward import Credit
from learner.credit import assign_credit, note_learner_logprobs
from learner.types import StepResult
from ray_jobs.run.metrics import LIMITS, average_shares, limit_of, shares_of_step, verdict
from reward.statistics import rollout_metrics
from rollout.codec import decode_group
from rollout.concurrency import WorkerReading
from rollout.lifecycle import Batch, GroupRow, State, Totals
from rollout.types import Group, Trajectory

RISE_WINDOW, RISE = 4, 0.1
"""Train steps over which shares of attempts without an answer are averaged, and the rise of one that is a warning."""


def step_metrics(
    batch: Batch,
    result: StepResult,
    readings: Sequence[WorkerReading],
    *,
    wait_s: float,
    train_s: float,
    publish_s: float,
) -> dict[str, float]:
    """Return the metrics of a train step by name."""
    facts = batch.facts
    shares = shares_of_step(facts, readings, wait_s=wait_s, train_s=train_s, publish_s=publish_s)
    return {
        **rollout_metrics(facts),
        **result.metrics,
        **batch.bias,
        **{f"groups/{name}": float(value) for name, value in asdict(batch.counts).items()},
        **{f"solved/{name}": rate for name, rate in batch.solved.items()},
        "learner/wait_s": wait_s,
        "learner/publish_s": publish_s,
        "time/step_s": wait_s + train_s + publish_s,
        **{f"util/{name}": share for name, share in shares.items()},
        "util/bottleneck": float(list(LIMITS).index(limit_of(shares))),
    }


def batch_groups(batch: Batch) -> Iterator[Group]:
    """Fetch the groups that a batch trains, when the first is asked for, and decode them one by one."""
    yield from map(decode_group, ray.get(list(batch.refs)))


def step_trajectories(
    batch: Batch, groups: Iterable[Group], result: StepResult, *, scheme: Credit
) -> Iterator[Trajectory]:
    """Yield the trajectories of the batch with their credit, then those kept for reading."""
    trained = result.skipped is None
    verdict = State.TRAINED if trained else State.REFUSED
    for group in groups:
        assign_credit(group, scheme=scheme)
        for trajectory in group.trajectories:
            note_learner_logprobs(trajectory, result.learner_logprobs, batch.version_ages)
            trajectory.step, trajectory.verdict = batch.step, verdict
            trajectory.trained_as = result.policy_version if trained else None
            trajectory.reason = result.skipped or ""
            yield trajectory
    # Ray starts a cluster for an empty list, too.
    payloads = ray.get([ref for _, _, ref in batch.untrained]) if batch.untrained else []
    for (state, reason, _), payload in zip(batch.untrained, payloads, strict=True):
        for trajectory in decode_group(payload).trajectories:
            trajectory.step, trajectory.verdict, trajectory.reason = batch.step, state, reason
            yield trajectory


def group_rows(batch: Batch, result: StepResult) -> list[GroupRow]:
    """Return what became of all groups since the batch before, those of this batch included."""
    end = {"state": State.REFUSED if result.skipped else State.TRAINED, "reason": result.skipped or ""}
    return [structs.replace(row, **end) if row.state is State.IN_BATCH else row for row in batch.rows]


class Training:
    """The metrics of the train steps so far."""

    def __init__(self, rows: Iterable[Mapping[str, float]], *, num_steps: int) -> None:
        """Continue after these rows, with `num_steps` train steps behind them."""
        self.num_steps, self.rows = num_steps, list(rows)
        self.ended_early: str | None = None
        """Why signal ran out before the last train step; None if it did not."""

    def add(self, step: int, row: Mapping[str, float]) -> list[str]:
        """Add a train step; return warnings about shares that rose above their lowest window.

        The policy may learn to break its agent.
        """
        self.num_steps = step
        self.rows.append(row)
        warnings = []
        for name in ("rollout/failed_share", "rollout/unscored_share"):
            shares = [row[name] for row in self.rows if name in row]
            means = [fmean(shares[at : at + RISE_WINDOW]) for at in range(0, len(shares), RISE_WINDOW)]
            rise = means[-1] - min(means[:-1], default=0.0) if means else 0.0
            if len(shares) % RISE_WINDOW == 0 and rise > RISE:
                risen = f"{name} over {RISE_WINDOW} steps is {means[-1]:.3g}, {rise:.3g} above its lowest"
                warnings.append(f"warning: {risen}; the reasons are under `failure` in trajectories.jsonl")
        return warnings

    @property
    def progress_fields(self) -> dict[str, float | str]:
        last = self.rows[-1]
        shown = {"entropy": "policy/entropy", "tokens": "rollout/sampled_tokens", "step_s": "time/step_s"}
        fields: dict[str, float | str] = {}
        if "rollout/solve_rate" in last:
            fields["solved"] = f"{last['rollout/solve_rate']:.0%}"
        fields |= {field: last[name] for field, name in shown.items() if name in last}
        errors = last.get("rollout/format_errors", 0.0) + last.get("rollout/tool_errors", 0.0)
        return fields | ({"errors_per_attempt": errors} if errors >= 0.1 else {})

    def facts(self, sampling: Handle, num_restarts: int) -> dict[str, object]:
        """Return the numbers of the RL phase."""
        totals: Totals = ray.get(sampling.totals.remote())
        counted = ("drawn", "trained", "refused", "filtered", "failed", "expired", "lost")
        return {
            "num_steps": self.num_steps,
            "ended_early": self.ended_early,
            # A resumed run has read it as a float.
            "num_trajectories": int(totals.facts.get("trajectories", 0)),
            "staleness": {
                "mean": sum(row["policy/age_mean"] for row in self.rows) / max(len(self.rows), 1),
                "max": max((row["policy/staleness_max"] for row in self.rows), default=0.0),
            },
            "groups": {
                **{name: getattr(totals.counts, name) for name in counted},
                "live_at_end": totals.counts.live,
                "reasons": totals.reasons,
            },
            "restarts": num_restarts,
            # The same version sampled and scored the first batch, so that any gap is numerical.
            "logprob_gap_version0": self.rows[0]["policy/logprob_gap_abs"] if self.rows else None,
            "bottleneck": verdict(average_shares(self.rows)) if self.rows else None,
        }
