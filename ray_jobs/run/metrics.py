"""The table of metrics: the name of every metric that a run logs, its unit and its meaning."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from actors.cluster import WORKER_GAUGES
from envs.datasets.families import FAMILIES

Unit = Literal["share", "s", "count", "tokens", "versions", "steps", "nats", "number"]
"""`share` is in [0, 1]; `number` has no unit."""

GROUPS: Mapping[str, str] = {
    "rollout": "Rollouts",
    "mix": "Tasks drawn",
    "solved": "Tasks solved, by family",
    "held_out": "Held-out tasks while training",
    "policy": "Policy",
    "prm": "Process reward model",
    "bias": "Sampling bias",
    "groups": "Groups",
    "learner": "Learner",
    "time": "Time",
    "util": "Utilisation",
    "cold_start": "Cold start",
    "train_prm": "Training of the process reward model",
}
"""Titles of the first parts of metric names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A logged number."""

    name: str
    """`group/rest`"""
    unit: Unit
    says: str
    """Its meaning in one line without a full stop."""


def _metrics(group: str, *rows: tuple[str, Unit, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name=f"{group}/{rest}", unit=unit, says=says) for rest, unit, says in rows)


LOGGED: tuple[Metric, ...] = (
    *_metrics(
        "rollout",
        ("solve_rate", "share", "Mean score of all groups' scored trajectories since the step before; 1 is right"),
        ("trajectories", "count", "Trajectories of groups that ended since the step before, dropped groups included"),
        ("turns", "number", "Planner turns per trajectory, malformed ones too"),
        ("sampled_tokens", "tokens", "Sampled tokens per trajectory, those of frozen modules included"),
        ("format_errors", "number", "Malformed planner turns per trajectory"),
        ("truncated_share", "share", "Trajectories with a turn that the token limit cut off"),
        ("tool_errors", "number", "Tool calls per trajectory that ended in an error"),
        ("repeat_share", "share", "Planner turns that repeat a tool call of the same trajectory"),
        (
            "infrastructure_failures",
            "count",
            "Trajectories that a tool or engine left unscored, without retried groups",
        ),
        ("groups_kept_share", "share", "Groups with signal, some right and some wrong, among those that ended"),
    ),
    *_metrics(
        "mix",
        *(
            (family, "share", f"Groups of the generated family {family} among those that ended since the step before")
            for family in FAMILIES
        ),
    ),
    *_metrics(
        "solved",
        *((family, "share", f"Solve rate while sampling, over the last 8 groups of {family}") for family in FAMILIES),
    ),
    *_metrics(
        "held_out",
        ("solve_rate", "share", "Held-out tasks solved greedily after this step (evaluation.every_steps)"),
        ("low", "share", "Lower end of its 95% Wilson interval"),
        ("high", "share", "Upper end of its 95% Wilson interval"),
        ("tasks", "count", "Scored tasks behind held_out/solve_rate"),
        ("unscored", "count", "Held-out tasks without a score: every attempt failed, or the scorer could not decide"),
        ("policy_version", "versions", "The policy version that was evaluated"),
        ("wall_s", "s", "Seconds that the loop waited for this evaluation"),
    ),
    *_metrics(
        "policy",
        ("loss", "number", "The minimised objective; with normalised advantages its level means little"),
        ("grad_norm", "number", "Norm of the gradient before it was clipped"),
        ("skipped", "count", "1 if the guard refused the step and the weights did not change"),
        ("choice_tokens", "count", "Loss tokens that sampler or learner gave a probability below 0.999"),
        ("choice_tokens_age0", "count", "Choice tokens sampled by the weights that are updated"),
        ("choice_tokens_stale", "count", "Choice tokens sampled by older weights"),
        ("ratio", "number", "Mean ratio of the learner's probability to the sampler's, over choice tokens"),
        ("clip_high", "share", "Loss tokens above the trust region and pushed up: no gradient (cispo: weight bounded)"),
        ("clip_low", "share", "Loss tokens below the trust region and pushed down: no gradient"),
        ("effective_sample_size", "share", "Evenness of the choice tokens' ratios; near 0 a few tokens dominate"),
        ("effective_sample_size_age0", "share", "The same at tokens of the current weights"),
        ("effective_sample_size_stale", "share", "The same at tokens of older weights"),
        (
            "correction_masked_share",
            "share",
            "Loss tokens inside the trust region to which the correction gave weight 0",
        ),
        ("stale_masked_share", "share", "Sampled tokens left out of the loss as older than max_staleness"),
        ("logprob_gap_abs", "nats", "Mean distance of learner's and engine's log-probs over choice tokens"),
        ("mismatch_k3", "nats", "Estimated KL divergence of learner from sampler, per choice token"),
        ("mismatch_k3_age0", "nats", "The same at tokens of the current weights: numerical noise, or a fault"),
        ("mismatch_k3_stale", "nats", "The same at tokens of older weights: numerical and staleness together"),
        ("staleness_max", "steps", "Age of the batch's oldest trained token: train steps since its weights"),
        ("age_mean", "steps", "Mean age of the trained tokens"),
        ("kl_ref_k3", "nats", "Estimated KL divergence from the policy that RL started with (flow_grpo, custom loss)"),
    ),
    *_metrics(
        "prm",
        ("score", "share", "Mean score that the process reward model gave a step"),
        ("unscored_share", "share", "Steps for which the PRM gave no usable score"),
        ("saturated_share", "share", "Scores within 0.02 of 0 or 1"),
        ("length_correlation", "number", "Correlation of score and decision length"),
        (
            "sibling_auroc",
            "share",
            "Attempts with a higher mean score than a sibling whose outcome is worse; 0.5 is chance",
        ),
        (
            "sibling_z",
            "number",
            "Distance of prm/sibling_auroc from chance in standard deviations",
        ),
        ("weight", "number", "Weight of the step scores in the advantage; alarms lower it, quiet steps restore it"),
        ("canary_max", "share", "Highest score of a junk decision in any group; should stay low"),
        ("rejudge_mse", "number", "Mean squared error of the scores against the known plan, on the batch's groups"),
    ),
    *_metrics(
        "bias",
        (
            "length_trained_over_drawn",
            "number",
            "Tokens of trained groups over all with signal; 1 is unbiased",
        ),
        ("slow_decile_share", "share", "Trained groups among the slowest tenth of those with signal; 0.1 is unbiased"),
    ),
    *_metrics(
        "groups",
        ("drawn", "count", "Groups drawn so far; the other groups/ counts add up to it"),
        ("queued", "count", "Groups that wait for a worker"),
        ("running", "count", "Groups in rollout now"),
        ("ready", "count", "Groups with signal that wait for their batch"),
        ("in_batch", "count", "Groups of the batch that is trained now"),
        ("trained", "count", "Groups trained so far"),
        ("refused", "count", "Groups so far of batches that the guard refused"),
        ("all_right", "count", "Groups dropped so far because every trajectory was right"),
        ("all_wrong", "count", "Groups dropped so far because every trajectory was wrong"),
        ("overlong", "count", "Groups dropped so far because the overlong rule left no difference to train on"),
        ("failed", "count", "Groups failed so far after their last attempt"),
        ("expired", "count", "Groups dropped so far as too stale; their tasks were drawn again"),
        ("lost", "count", "Groups that were in flight when the run was cut off; their tasks were drawn again"),
    ),
    *_metrics(
        "learner",
        ("step_s", "s", "Seconds of the optimizer step"),
        ("wait_s", "s", "Seconds that the learner waited for its batch"),
        ("publish_s", "s", "Seconds to publish the new weights, on the learner's side"),
        ("loss_tokens", "tokens", "Tokens that were trained"),
        ("packed_tokens", "tokens", "Tokens that were computed, shared prefixes once"),
        ("sequence_tokens", "tokens", "Tokens of the trajectories, shared prefixes every time"),
    ),
    *_metrics("time", ("step_s", "s", "Seconds of a train step: waiting for its batch, computing, publishing")),
    *_metrics(
        "util",
        ("bottleneck", "number", "Which part limits the run, by its number (see docs/metrics.md)"),
        ("learner_busy", "share", "Of the loop's time: the learner computes"),
        ("learner_wait", "share", "Of the loop's time: the learner waits for a batch"),
        ("publish", "share", "Of the loop's time: new weights are published"),
        ("engine_busy", "share", "Of the workers' time: their engine computes"),
        ("backpressure", "share", "Of the workers' time: they wait for admission with places free"),
        ("tool_wait", "share", "Of the trajectories' time: in tools, or in a custom agent's code"),
        ("prm_wait", "share", "Of the groups' time: they wait for PRM scores"),
        ("kept_share", "share", "Groups with signal among those that ended, as util/bottleneck counts them"),
        ("places_used", "share", "Running groups over the places that the engines' caches allow"),
        (
            "repeated",
            "share",
            "Of the tokens that engines compute: computed before, and evicted since",
        ),
    ),
    *_metrics(
        "cold_start",
        ("loss", "nats", "Mean negative log-likelihood of the demonstrations' tokens"),
        ("grad_norm", "number", "Norm of the gradient before it was clipped"),
        ("step_s", "s", "Seconds of the optimizer step"),
        ("packed_tokens", "tokens", "Tokens that were computed, shared prefixes once"),
    ),
    *_metrics("train_prm", ("loss", "number", "Loss of the process reward model on a batch of labelled steps")),
)
"""The metrics of metrics.jsonl."""

_LIVE_UNITS: dict[str, Unit] = {"worker/policy_version": "versions", "worker/kv_usage": "share"}
LIVE: tuple[Metric, ...] = tuple(
    Metric(name=name, unit=_LIVE_UNITS.get(name, "count"), says=says) for name, says in WORKER_GAUGES.items()
)
"""Gauges that rollout workers set themselves; each has the worker's number as a tag."""

BY_NAME = {metric.name: metric for metric in (*LOGGED, *LIVE)}
DESCRIPTIONS = {metric.name: metric.says for metric in LOGGED}
