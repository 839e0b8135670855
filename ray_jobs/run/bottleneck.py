"""The part that limits a run: a verdict from shares of time."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Literal, get_args

from rollout.concurrency import WorkerReading

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
    """Average the shares in the metrics of at least one train step: by its seconds, and `kept_share` by its number of
    trajectories."""
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
