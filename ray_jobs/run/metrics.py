"""The metrics of a run: a table of names, units and meanings, and the verdict on the part that limits the run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from actors.cluster import WORKER_GAUGES
from envs.datasets.families import FAMILIES
from rollout.concurrency import WorkerReading

Unit = Literal["share", "s", "count", "tokens", "versions", "steps", "nats", "number"]
"""`share` is in [0, 1]; `number` has no unit."""


class Metric(NamedTuple):
    """A logged number: `group/rest`, its unit, and its meaning in one line without a full stop."""

    name: str
    unit: Unit
    says: str


_TABLE: Mapping[tuple[str, str], tuple[tuple[str, Unit, str], ...]] = {
    ("rollout", "Rollouts"): (
        ("solve_rate", "share", "Mean score of scored trajectories since the step before; 1 is right"),
        ("trajectories", "count", "Trajectories of groups that ended since the step before, dropped groups included"),
        ("turns", "number", "Planner turns per trajectory, malformed ones too"),
        ("sampled_tokens", "tokens", "Sampled tokens per trajectory, those of frozen modules included"),
        ("format_errors", "number", "Malformed planner turns per trajectory"),
        ("truncated_share", "share", "Trajectories with a turn that the token limit cut off"),
        ("tool_errors", "number", "Tool calls per trajectory that ended in an error"),
        ("repeat_share", "share", "Planner turns that repeat a tool call of the same trajectory"),
        ("failed_share", "share", "Trajectories whose agent failed or went beyond its own limits: counted wrong"),
        ("unscored_share", "share", "Trajectories without a score, without retried groups"),
        ("infrastructure_failures", "count", "Trajectories left unscored by a tool or engine, without retried groups"),
    ),
    ("solved", "Tasks solved, by data set"): tuple(
        (family, "share", "Solve rate of the last 8 tasks of this data set while sampling") for family in FAMILIES
    ),
    ("held_out", "Held-out tasks while training"): (
        ("solve_rate", "share", "Held-out tasks solved greedily after this step (evaluation.every_steps)"),
        ("low", "share", "Lower end of its 95% Wilson interval"),
        ("high", "share", "Upper end of its 95% Wilson interval"),
        ("tasks", "count", "Scored tasks behind held_out/solve_rate"),
        ("unscored", "count", "Held-out tasks without a score: every attempt failed, or the scorer could not decide"),
        ("policy_version", "versions", "The policy version that was evaluated"),
        ("wall_s", "s", "Seconds that the loop waited for this evaluation"),
    ),
    ("policy", "Policy"): (
        ("loss", "number", "The minimised objective; with normalised advantages its level means little"),
        ("grad_norm", "number", "Norm of the gradient before it was clipped"),
        ("entropy", "nats", "Sampler's entropy per loss token, estimated by -log p; 0 where only one token is allowed"),
        ("skipped", "count", "1 if the guard refused the step and the weights did not change"),
        ("choice_tokens", "count", "Loss tokens that sampler or learner gave a probability of at most 0.999"),
        ("choice_tokens_age0", "count", "Choice tokens sampled by the weights that are updated"),
        ("choice_tokens_stale", "count", "Choice tokens sampled by older weights"),
        ("ratio", "number", "Mean ratio of the learner's probability to the sampler's, over choice tokens"),
        ("clip_high", "share", "Loss tokens above the trust region and pushed up: no gradient (cispo: weight bounded)"),
        ("clip_low", "share", "Loss tokens below the trust region and pushed down: no gradient"),
        ("effective_sample_size", "share", "Evenness of the choice tokens' ratios; near 0 a few tokens dominate"),
        ("effective_sample_size_age0", "share", "The same at tokens of the current weights"),
        ("effective_sample_size_stale", "share", "The same at tokens of older weights"),
        ("correction_masked_share", "share", "Loss tokens in the trust region to which the correction gave weight 0"),
        ("stale_masked_share", "share", "Sampled tokens left out of the loss as older than max_staleness"),
        ("logprob_gap_abs", "nats", "Mean distance of learner's and engine's log-probs over choice tokens"),
        ("mismatch_k3", "nats", "Estimated KL divergence of learner from sampler, per choice token"),
        ("mismatch_k3_age0", "nats", "The same at tokens of the current weights: numerical noise, or a fault"),
        ("mismatch_k3_stale", "nats", "The same at tokens of older weights: numerical and staleness together"),
        ("staleness_max", "steps", "Age of the batch's oldest trained token: train steps since its weights"),
        ("age_mean", "steps", "Mean age of the trained tokens"),
        ("kl_ref_k3", "nats", "Estimated KL divergence from the policy that RL started with (flow_grpo, custom loss)"),
    ),
    ("prm", "Process reward model"): (
        ("score", "share", "Mean score that the process reward model gave a step"),
        ("unscored_share", "share", "Steps for which the PRM gave no usable score"),
        ("saturated_share", "share", "Scores within 0.02 of 0 or 1"),
    ),
    ("guided", "Guided attempts"): (
        ("groups", "count", "Groups without a right attempt, for which guided ones were made"),
        ("rescued_share", "share", "Those of them that a guided attempt gave signal"),
        ("sampled_tokens", "tokens", "Sampled for guided attempts, those of decisions not taken included"),
    ),
    ("bias", "Sampling bias"): (
        ("length_trained_over_drawn", "number", "Tokens of trained groups over all with signal; 1 is unbiased"),
        ("slow_decile_share", "share", "Trained groups among the slowest tenth of those with signal; 0.1 is unbiased"),
    ),
    ("groups", "Groups"): (
        ("drawn", "count", "Groups drawn so far; the other groups/ counts add up to it"),
        ("queued", "count", "Groups that wait for a worker"),
        ("running", "count", "Groups in rollout now"),
        ("ready", "count", "Groups with signal that wait for their batch"),
        ("in_batch", "count", "Groups of the batch that is trained now"),
        ("trained", "count", "Groups trained"),
        ("refused", "count", "Groups of batches that the guard refused"),
        ("all_right", "count", "Groups dropped: every trajectory was right"),
        ("all_wrong", "count", "Groups dropped: every trajectory was wrong"),
        ("overlong", "count", "Groups dropped: the overlong rule left too little to train on"),
        ("unscored", "count", "Groups dropped: fewer than half of the trajectories could be scored"),
        ("failed", "count", "Groups that failed after their last attempt"),
        ("expired", "count", "Groups dropped as too stale; their tasks were drawn again"),
        ("lost", "count", "Groups in flight when the run was cut off; their tasks were drawn again"),
    ),
    ("learner", "Learner"): (
        ("step_s", "s", "Seconds of the optimizer step"),
        ("wait_s", "s", "Seconds that the learner waited for its batch"),
        ("publish_s", "s", "Seconds to publish the new weights, on the learner's side"),
        ("loss_tokens", "tokens", "Tokens that were trained"),
        ("packed_tokens", "tokens", "Tokens that were computed, shared prefixes once"),
        ("sequence_tokens", "tokens", "Tokens of the trajectories, shared prefixes every time"),
    ),
    ("time", "Time"): (("step_s", "s", "Seconds of a train step: waiting for its batch, computing, publishing"),),
    ("util", "Utilisation"): (
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
    ),
    ("cold_start", "Cold start"): (
        ("loss", "nats", "Mean negative log-likelihood of the demonstrations' tokens"),
        ("grad_norm", "number", "Norm of the gradient before it was clipped"),
        ("step_s", "s", "Seconds of the optimizer step"),
        ("packed_tokens", "tokens", "Tokens that were computed, shared prefixes once"),
    ),
    ("train_prm", "Training of the process reward model"): (
        ("loss", "number", "Loss of the process reward model on a batch of labelled steps"),
    ),
}
"""Name, unit and meaning of each metric, by the first part of its name and the title of that group."""

GROUPS = dict(_TABLE.keys())
"""Titles of the first parts of metric names."""
LOGGED = [Metric(f"{group}/{rest}", unit, says) for (group, _), rows in _TABLE.items() for rest, unit, says in rows]
"""The metrics of metrics.jsonl."""

_LIVE_UNITS: Mapping[str, Unit] = {"worker/policy_version": "versions", "worker/kv_usage": "share"}
LIVE = [Metric(name, _LIVE_UNITS.get(name, "count"), says) for name, says in WORKER_GAUGES.items()]
"""Gauges that rollout workers set themselves; each has the worker's number as a tag."""

DESCRIPTIONS = {metric.name: metric.says for metric in (*LOGGED, *LIVE)}

Shares = Mapping[str, float]
"""Shares of time and of counts, all in [0, 1], by the names that they have below `util/`."""

LIMITS: Mapping[str, tuple[str, ...]] = {
    "learner": ("learner_wait", "backpressure"),
    "engine": ("engine_busy", "learner_wait", "places_used"),
    "tools": ("tool_wait", "engine_busy", "places_used"),
    "prm": ("prm_wait", "learner_wait"),
    "signal": ("kept_share", "learner_wait"),
    "admission": ("backpressure", "learner_wait"),
    "weight_sync": ("publish",),
    "balanced": ("learner_busy", "learner_wait", "engine_busy"),
}
"""The parts that can limit a run, with the shares that show it. `util/bottleneck` is the index of a limit here."""


def verdict(shares: Shares) -> str:
    """Name the limit and the shares behind it in one line."""
    limit = limit_of(shares)
    numbers = ", ".join(f"{name.replace('_', ' ')} {shares[name]:.0%}" for name in LIMITS[limit])
    return f"limited by {'no part' if limit == 'balanced' else limit.replace('_', ' ')} ({numbers})"


def limit_of(shares: Shares) -> str:
    """Return the first limit that holds. The order matters: a later part can look busy because of an earlier one."""
    learner_waits, held_back = shares["learner_wait"] >= 0.2, shares["backpressure"] >= 0.2
    engine_is_busy = shares["engine_busy"] >= 0.7
    rules = {
        "weight_sync": shares["publish"] >= max(0.25, shares["learner_wait"]),
        "learner": held_back and not learner_waits,
        "balanced": not learner_waits,
        # More groups of the same kind would be dropped as well.
        "signal": shares["kept_share"] < 0.3,
        # A PRM on the same machine slows tools and engine down.
        "prm": shares["prm_wait"] >= 0.3,
        "tools": shares["tool_wait"] >= 0.4 and not engine_is_busy,
        # More work for a busy engine only ages the data.
        "engine": engine_is_busy,
        "admission": held_back,
    }
    return next((limit for limit, holds in rules.items() if holds), "balanced")


def shares_of_step(
    facts: Mapping[str, float],
    readings: Sequence[WorkerReading],
    *,
    wait_s: float,
    train_s: float,
    publish_s: float,
) -> Shares:
    """Return the shares of one train step, which waited for its batch, trained and published for these seconds.

    `facts` are sums over the groups that finished since the step before, and over their trajectories. A missing one is
    0, and so is the share of an empty whole, but for a `kept_share` of 1 if no group finished.
    """
    fact = defaultdict(float, facts)
    step_s = wait_s + train_s + publish_s
    elapsed_s = sum(reading.elapsed_s for reading in readings)
    places = sum(reading.places for reading in readings)
    return {
        "learner_busy": _share(train_s, step_s),
        "learner_wait": _share(wait_s, step_s),
        "publish": _share(publish_s, step_s),
        "engine_busy": _share(sum(reading.engine_busy_s for reading in readings), elapsed_s),
        "backpressure": _share(sum(reading.admission_wait_s for reading in readings), elapsed_s),
        "tool_wait": _share(fact["tool_s"], fact["generate_s"] + fact["tool_s"]),
        "prm_wait": _share(fact["prm_s"], fact["duration_s"]),
        "kept_share": _share(fact["kept"], fact["groups"]) if fact["groups"] > 0 else 1.0,
        "places_used": _share(sum(reading.running for reading in readings), places),
    }


def average_shares(rows: Sequence[Mapping[str, float]]) -> Shares:
    """Average shares over train steps by their seconds, and `kept_share` by their numbers of trajectories."""
    shares = {}
    for name in (rest for rest, unit, _ in _TABLE["util", "Utilisation"] if unit == "share"):
        weight = "rollout/trajectories" if name == "kept_share" else "time/step_s"
        weights = [row.get(weight, 0.0) for row in rows]
        shares[name] = fmean((row.get(f"util/{name}", 0.0) for row in rows), weights if any(weights) else None)
    return shares


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole if whole > 0 else 0.0))
