"""Which part limits the run, from where the time went; and what to change, of what recipe and machine allow."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Literal, get_args

from pydantic import ValidationError

from configs.loading import value_of, with_changes
from configs.run import RunConfig
from ray_jobs.checks.machine import check_machine
from ray_jobs.run.model_folder import PreflightError
from ray_jobs.run.preflight import check_recipe
from rollout.concurrency import WorkerReading

Limit = Literal["learner", "engine", "tools", "prm", "signal", "admission", "weight_sync", "balanced"]
LIMITS: tuple[Limit, ...] = get_args(Limit)
"""The number of a limit, in `util/bottleneck`, is its index here."""

WAIT_HIGH = 0.2
"""A learner that waits less than this for its batches is fed."""
PUBLISH_HIGH = 0.25
BACKPRESSURE_HIGH = 0.2
KEPT_LOW = 0.3
PRM_HIGH = 0.3
TOOLS_HIGH = 0.4
ENGINE_HIGH = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where time went, all in [0, 1].

    Of the loop's wall time: `learner_busy` (the train step computes), `learner_wait` (for a batch), `publish` (of new
    weights, on the learner's side). Of the workers' wall time: `backpressure` (waiting for admission with free places)
    and `engine_busy` (the engine steps, requests are open). `tool_wait`: of a trajectory's time, in tools. `prm_wait`:
    of a group's time, waiting for PRM scores. `kept_share`: groups with signal among those that ended. `places_used`:
    running groups over allowed places. `repeated`: of the tokens that the engines compute, those that they had computed
    for the turn before and that are in their caches no more.
    """

    learner_busy: float
    learner_wait: float
    publish: float
    backpressure: float
    engine_busy: float
    tool_wait: float
    prm_wait: float
    kept_share: float
    places_used: float
    repeated: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What limits, the numbers that decided, and what to do; `text` and `hint` are one line each."""

    limit: Limit
    text: str
    hint: str


_SAID: Mapping[Limit, str] = {
    "weight_sync": "publishing weights limits: it takes {publish:.0%} of the learner's time, "
    "and waiting for batches {learner_wait:.0%}",
    "learner": "the learner limits: it waits for batches {learner_wait:.0%} of its time, "
    "workers with free places wait for admission {backpressure:.0%} of theirs",
    "signal": "missing signal limits: only {kept_share:.0%} of the groups can be trained on, "
    "and the learner waits {learner_wait:.0%} of its time",
    "prm": "the scores of steps limit: groups wait for them {prm_wait:.0%} of their time, "
    "and the learner waits {learner_wait:.0%} of its",
    "tools": "tools limit: trajectories spend {tool_wait:.0%} of their time in them while the engine is busy only "
    "{engine_busy:.0%}; {places_used:.0%} of the places are used",
    "engine": "the engine limits: it is busy {engine_busy:.0%} of the time while the learner waits {learner_wait:.0%}; "
    "{places_used:.0%} of the places are used, and {repeated:.0%} of its tokens it had computed before",
    "admission": "admission limits: workers with free places wait for it {backpressure:.0%} of their time, "
    "and the learner waits {learner_wait:.0%} of its",
    "balanced": "nothing stands out: the learner computes {learner_busy:.0%} and waits {learner_wait:.0%} of its time, "
    "the engine is busy {engine_busy:.0%}",
}


def bottleneck(shares: Shares, hints: Mapping[Limit, str]) -> Verdict:
    """What limits, in words; `hints` say for each limit what to do."""
    limit = limit_of(shares)
    return Verdict(limit=limit, text=_SAID[limit].format(**asdict(shares)), hint=hints[limit])


def limit_of(shares: Shares) -> Limit:
    """First the learner's side, then, where the learner waits, why no batch is there. The first that holds:

    1. weight_sync: publishing is high, and at least the wait for batches. Before the learner, who looks fed as well.
    2. The learner is fed: the learner limits if workers are held back, otherwise both sides keep pace (balanced).
    3. signal: few groups are kept. Before all that follows: more of the same would be dropped as well.
    4. prm: groups wait long for scores. Before tools and engine, which slow down when the PRM shares their machine.
    5. tools: trajectories wait long for tools, and that leaves the engine idle. A busy engine hides them.
    6. engine: it is busy. Before admission: what a busy engine is given more of only gets older.
    7. admission: workers are held back although the learner waits. Always so at depth 0 with fast rollouts.
    8. balanced.
    """
    if shares.publish >= max(PUBLISH_HIGH, shares.learner_wait):
        return "weight_sync"
    held_back = shares.backpressure >= BACKPRESSURE_HIGH
    if shares.learner_wait < WAIT_HIGH:
        return "learner" if held_back else "balanced"
    engine_is_busy = shares.engine_busy >= ENGINE_HIGH
    rules: tuple[tuple[bool, Limit], ...] = (
        (shares.kept_share < KEPT_LOW, "signal"),
        (shares.prm_wait >= PRM_HIGH, "prm"),
        (shares.tool_wait >= TOOLS_HIGH and not engine_is_busy, "tools"),
        (engine_is_busy, "engine"),
        (held_back, "admission"),
    )
    return next((limit for holds, limit in rules if holds), "balanced")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one turn of the loop: waiting for the batch, the train step, publishing, and all of it."""

    wait_s: float
    train_s: float
    publish_s: float
    step_s: float


def shares_of_step(times: StepTimes, facts: Mapping[str, float], readings: Sequence[WorkerReading]) -> Shares:
    """The shares of one train step, from what has happened since the step before.

    `facts` are sums over the groups that ended: over their trajectories `generate_s` (waiting for completions) and
    `tool_s`; over the groups `duration_s` (from permit to scores), `prm_s` (the part of it that waited for scores),
    `groups` and `kept`. A missing fact is 0. A share of nothing is 0, but with no group ended none was dropped: then
    `kept_share` is 1.
    """
    known = {name: facts.get(name, 0.0) for name in ("generate_s", "tool_s", "duration_s", "prm_s", "groups", "kept")}
    elapsed_s = sum(one.elapsed_s for one in readings)
    return Shares(
        learner_busy=_share(times.train_s, times.step_s),
        learner_wait=_share(times.wait_s, times.step_s),
        publish=_share(times.publish_s, times.step_s),
        backpressure=_share(sum(one.admission_wait_s for one in readings), elapsed_s),
        engine_busy=_share(sum(one.engine_busy_s for one in readings), elapsed_s),
        tool_wait=_share(known["tool_s"], known["generate_s"] + known["tool_s"]),
        prm_wait=_share(known["prm_s"], known["duration_s"]),
        kept_share=_share(known["kept"], known["groups"]) if known["groups"] > 0 else 1.0,
        places_used=_share(sum(one.running for one in readings), sum(one.places for one in readings)),
        repeated=_share(sum(one.repeated_tokens for one in readings), sum(one.computed_tokens for one in readings)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShares:
    """The shares of one train step, its seconds, and how many trajectories ended in it."""

    shares: Shares
    step_s: float
    num_trajectories: float


def average_shares(steps: Sequence[StepShares]) -> Shares:
    """The shares of all steps together, of which there is one at least: a step counts by its seconds, its groups by
    their number. Steps without a weight count the same."""
    by_time = [one.step_s for one in steps]
    weights = {field.name: by_time for field in fields(Shares)}
    weights["kept_share"] = [one.num_trajectories for one in steps]
    return Shares(
        **{
            name: fmean((getattr(one.shares, name) for one in steps), of if any(of) else None)
            for name, of in weights.items()
        }
    )


def verdict_metrics(shares: Shares) -> dict[str, float]:
    """Scalars under their stable names: every share, so that a log gives them back, and the number of the limit."""
    scalars = {f"util/{name}": value for name, value in asdict(shares).items()}
    return scalars | {"util/bottleneck": float(LIMITS.index(limit_of(shares)))}


def _share(part: float, whole: float) -> float:
    """In [0, 1] also where two clocks disagree a little, and 0 where it is not a number."""
    share = part / whole if whole > 0 else 0.0
    # Zero first: `max` keeps it against a NaN.
    return min(1.0, max(0.0, share))


Changes = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Advice:
    """`changes` is a first step in the direction that `text` names; None where it makes no sense in this recipe."""

    text: str
    changes: Callable[[RunConfig], Changes | None]


def hints(config: RunConfig) -> dict[Limit, str]:
    """One line for each limit: the advice that this recipe can follow on this machine."""
    return {limit: "; or ".join(advice.text for advice, _ in followable(config, limit)) or NO_ROOM for limit in LIMITS}


def followable(config: RunConfig, limit: Limit) -> Iterator[tuple[Advice, Changes]]:
    """The advice whose changes make a recipe that is valid and that preflight takes here."""
    for advice in _ADVICE[limit]:
        changes = advice.changes(config)
        if changes is not None and _accepted(config, changes):
            yield advice, changes


def _accepted(config: RunConfig, changes: Changes) -> bool:
    try:
        changed = with_changes(config, changes)
        check_recipe(changed)
        check_machine(changed)
    except (ValidationError, PreflightError):
        return False
    return True


def _prm_on_cpu(config: RunConfig) -> bool:
    return config.reward.prm is not None and config.prm.device == "cpu"


def _shifted(key: str, by: int) -> Callable[[RunConfig], Changes]:
    return lambda run: {key: int(value_of(run, key)) + by}


def _where(
    condition: Callable[[RunConfig], bool], changes: Callable[[RunConfig], Changes]
) -> Callable[[RunConfig], Changes | None]:
    return lambda run: changes(run) if condition(run) else None


def _further_ahead(run: RunConfig) -> Changes:
    ahead = run.pipeline_depth + 1
    return {"pipeline_depth": ahead, "max_staleness": max(ahead, run.max_staleness)}


NO_ROOM = "this machine has no room for more threads or workers: use one with more cores or a GPU"
_WORKERS = Advice("add workers with rollout.num_workers", _shifted("rollout.num_workers", 1))
_LEARNER_THREADS = Advice(
    "raise learner.num_threads", _where(lambda run: run.learner.device == "cpu", _shifted("learner.num_threads", 1))
)
_AHEAD = Advice(
    "raise pipeline_depth, so that rollouts may run further ahead; max_staleness is its bound", _further_ahead
)
_ADVICE: Mapping[Limit, tuple[Advice, ...]] = {
    "weight_sync": (
        Advice("publish less with a lower model.lora_rank", lambda run: {"model.lora_rank": run.model.lora_rank // 2}),
        Advice("publish less often with a higher batch_groups", _shifted("batch_groups", 1)),
    ),
    "learner": (
        _LEARNER_THREADS,
        Advice(
            "raise learner.microbatch_tokens",
            _where(lambda run: run.learner.device == "cuda", _shifted("learner.microbatch_tokens", 1)),
        ),
        Advice("lower pipeline_depth, since running ahead only ages the data", _shifted("pipeline_depth", -1)),
    ),
    "signal": (
        Advice("choose tasks in envs.mix that the policy solves sometimes", lambda run: {}),
        Advice("raise rollout.group_size", _shifted("rollout.group_size", 1)),
    ),
    "prm": (
        Advice(
            "raise prm.num_threads",
            _where(_prm_on_cpu, _shifted("prm.num_threads", 1)),
        ),
        Advice(
            "set prm.device=cuda",
            _where(_prm_on_cpu, lambda run: {"prm.device": "cuda"}),
        ),
        Advice(
            "use a smaller PRM: lower prm.num_layers or prm.max_tokens",
            _where(lambda run: run.reward.prm is not None, lambda run: {}),
        ),
        Advice(
            "make the function of reward.credit.turn_scorer faster",
            _where(lambda run: run.reward.turn_scorer is not None, lambda run: {}),
        ),
    ),
    "tools": (
        Advice(
            "hide the tools' latency behind more groups: raise rollout.engine.max_num_seqs where all places are used",
            _shifted("rollout.engine.max_num_seqs", 1),
        ),
        Advice("raise pipeline_depth where places are free; max_staleness is its bound", _further_ahead),
        _WORKERS,
    ),
    "engine": (
        _WORKERS,
        Advice("shorten turns with rollout.max_turn_tokens", _shifted("rollout.max_turn_tokens", -1)),
        Advice(
            "raise rollout.engine.kv_cache_gib where many tokens are computed again",
            _shifted("rollout.engine.kv_cache_gib", 1),
        ),
        Advice(
            "raise pipeline_depth where many places of a GPU are unused; max_staleness is its bound",
            _where(lambda run: run.rollout.engine.device == "cuda", _further_ahead),
        ),
    ),
    "admission": (_AHEAD,),
    "balanced": (_WORKERS, _LEARNER_THREADS),
}
