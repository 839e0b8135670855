"""The metrics of a run: a table of names, units and meanings, and the verdict on the part that limits the run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Literal, get_args

from actors.cluster import WORKER_GAUGES
from envs.datasets.families import FAMILIES
from rollout.concurrency import WorkerReading

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

Limit = Literal["learner", "engine", "tools", "prm", "signal", "admission", "weight_sync", "balanced"]
LIMITS: tuple[Limit, ...] = get_args(Limit)
"""`util/bottleneck` is the index of a limit here."""

WAIT_HIGH = 0.2
"""A learner that waits less than this for its batches is busy enough."""
PUBLISH_HIGH = 0.25
BACKPRESSURE_HIGH = 0.2
KEPT_LOW = 0.3
PRM_HIGH = 0.3
TOOLS_HIGH = 0.4
ENGINE_HIGH = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one turn of the training loop."""

    wait_s: float
    """Waiting for the batch."""
    train_s: float
    """The train step."""
    publish_s: float
    """Publishing the new weights."""
    step_s: float
    """All of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of time and of counts, all in [0, 1]."""

    learner_busy: float
    """Train step, of the loop's time."""
    learner_wait: float
    """Waiting for a batch, of the loop's time."""
    publish: float
    """Publishing weights, of the loop's time."""
    backpressure: float
    """Waiting for admission with free places, of the workers' time."""
    engine_busy: float
    """Engine steps with open requests, of the workers' time."""
    tool_wait: float
    """Time in tools, of the trajectories' time."""
    prm_wait: float
    """Waiting for PRM scores, of the groups' time."""
    kept_share: float
    """Groups with signal, of the finished groups."""
    places_used: float
    """Running groups, of the allowed places."""
    repeated: float
    """Tokens computed again after their eviction from a cache, of the tokens that engines computed."""


_TEXTS: Mapping[Limit, str] = {
    "weight_sync": "weight sync limits this run: publishing takes {publish:.0%} of the loop's time",
    "learner": "the learner limits this run: it waits {learner_wait:.0%} of its time; workers with free places wait "
    "{backpressure:.0%} of theirs",
    "signal": "missing signal limits this run: {kept_share:.0%} of the groups have a signal, and the learner waits "
    "{learner_wait:.0%} of its time",
    "prm": "step scoring limits this run: groups wait {prm_wait:.0%} of their time for scores, and the learner waits "
    "{learner_wait:.0%} of its time",
    "tools": "tools limit this run: trajectories spend {tool_wait:.0%} of their time in tools, and the engine is busy "
    "{engine_busy:.0%}; {places_used:.0%} of the places are used",
    "engine": "the engine limits this run: it is busy {engine_busy:.0%}, the learner waits {learner_wait:.0%} of its "
    "time; {places_used:.0%} of the places are used, and {repeated:.0%} of the tokens are computed again",
    "admission": "admission limits this run: workers with free places wait {backpressure:.0%} of their time, and the "
    "learner waits {learner_wait:.0%} of its time",
    "balanced": "no part limits this run: the learner computes {learner_busy:.0%} and waits {learner_wait:.0%} of "
    "its time, and the engine is busy {engine_busy:.0%}",
}


def verdict(shares: Shares) -> str:
    """Describe the limit and the shares behind it in one line."""
    return _TEXTS[limit_of(shares)].format(**asdict(shares))


def limit_of(shares: Shares) -> Limit:
    """Return the first limit that holds. The order matters: a later part can look busy because of an earlier one."""
    if shares.publish >= max(PUBLISH_HIGH, shares.learner_wait):
        return "weight_sync"
    held_back = shares.backpressure >= BACKPRESSURE_HIGH
    if shares.learner_wait < WAIT_HIGH:
        return "learner" if held_back else "balanced"
    engine_is_busy = shares.engine_busy >= ENGINE_HIGH
    rules: tuple[tuple[bool, Limit], ...] = (
        # More groups of the same kind would be dropped as well.
        (shares.kept_share < KEPT_LOW, "signal"),
        # A PRM on the same machine slows tools and engine down.
        (shares.prm_wait >= PRM_HIGH, "prm"),
        (shares.tool_wait >= TOOLS_HIGH and not engine_is_busy, "tools"),
        # More work for a busy engine only ages the data.
        (engine_is_busy, "engine"),
        (held_back, "admission"),
    )
    return next((limit for holds, limit in rules if holds), "balanced")


def shares_of_step(times: StepTimes, facts: Mapping[str, float], readings: Sequence[WorkerReading]) -> Shares:
    """Return the shares of one train step.

    `facts` are sums over the groups that finished since the step before: `generate_s` and `tool_s` over their
    trajectories, `duration_s`, `prm_s`, `groups` and `kept` over the groups. A missing fact is 0. The share of an empty
    whole is 0, except that `kept_share` is 1 if no group finished.
    """
    fact = {name: facts.get(name, 0.0) for name in ("generate_s", "tool_s", "duration_s", "prm_s", "groups", "kept")}
    elapsed_s = sum(reading.elapsed_s for reading in readings)
    return Shares(
        learner_busy=_share(times.train_s, times.step_s),
        learner_wait=_share(times.wait_s, times.step_s),
        publish=_share(times.publish_s, times.step_s),
        backpressure=_share(sum(reading.admission_wait_s for reading in readings), elapsed_s),
        engine_busy=_share(sum(reading.engine_busy_s for reading in readings), elapsed_s),
        tool_wait=_share(fact["tool_s"], fact["generate_s"] + fact["tool_s"]),
        prm_wait=_share(fact["prm_s"], fact["duration_s"]),
        kept_share=_share(fact["kept"], fact["groups"]) if fact["groups"] > 0 else 1.0,
        places_used=_share(sum(reading.running for reading in readings), sum(reading.places for reading in readings)),
        repeated=_share(
            sum(reading.repeated_tokens for reading in readings), sum(reading.computed_tokens for reading in readings)
        ),
    )


def average_shares(rows: Sequence[Mapping[str, float]]) -> Shares:
    """Average the shares in the metrics of at least one train step.

    The weight of a step is its seconds; for `kept_share` it is its number of trajectories.
    """
    shares = {}
    for name in (field.name for field in fields(Shares)):
        weight = "rollout/trajectories" if name == "kept_share" else "time/step_s"
        weights = [row.get(weight, 0.0) for row in rows]
        shares[name] = fmean((row.get(f"util/{name}", 0.0) for row in rows), weights if any(weights) else None)
    return Shares(**shares)


def verdict_metrics(shares: Shares) -> dict[str, float]:
    """Return every share and the number of the limit by their metric names."""
    scalars = {f"util/{name}": value for name, value in asdict(shares).items()}
    return scalars | {"util/bottleneck": float(LIMITS.index(limit_of(shares)))}


def _share(part: float, whole: float) -> float:
    # 0 comes first: `max` keeps it when the share is nan.
    return min(1.0, max(0.0, part / whole if whole > 0 else 0.0))
