"""What to change so that a run goes faster, of what its recipe and this machine allow: no advice is refused."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from configs.loading import with_changes
from configs.run import RunConfig
from ray_jobs.checks.machine import check_machine
from ray_jobs.metrics.bottleneck import LIMITS, Limit
from ray_jobs.run.model_folder import PreflightError
from ray_jobs.run.preflight import check_recipe

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


def _raised(key: str) -> Callable[[RunConfig], Changes]:
    return lambda run: {key: _value(run, key) + 1}


def _lowered(key: str) -> Callable[[RunConfig], Changes]:
    return lambda run: {key: _value(run, key) - 1}


def _where(condition: Callable[[RunConfig], bool], changes: Callable[[RunConfig], Changes]) -> Callable[..., Any]:
    return lambda run: changes(run) if condition(run) else None


def _value(run: RunConfig, key: str) -> int:
    value: Any = run
    for part in key.split("."):
        value = getattr(value, part)
    return int(value)


def _further_ahead(run: RunConfig) -> Changes:
    ahead = run.pipeline_depth + 1
    return {"pipeline_depth": ahead, "max_staleness": max(ahead, run.max_staleness)}


NO_ROOM = "this machine has no room for more threads or workers: use one with more cores or a GPU"
_WORKERS = Advice("add workers with rollout.num_workers", _raised("rollout.num_workers"))
_LEARNER_THREADS = Advice(
    "raise learner.num_threads", _where(lambda run: run.learner.device == "cpu", _raised("learner.num_threads"))
)
_AHEAD = Advice(
    "raise pipeline_depth, so that rollouts may run further ahead; max_staleness is its bound", _further_ahead
)
_ADVICE: Mapping[Limit, tuple[Advice, ...]] = {
    "weight_sync": (
        Advice("publish less with a lower model.lora_rank", lambda run: {"model.lora_rank": run.model.lora_rank // 2}),
        Advice("publish less often with a higher batch_groups", _raised("batch_groups")),
    ),
    "learner": (
        _LEARNER_THREADS,
        Advice(
            "raise learner.microbatch_tokens",
            _where(lambda run: run.learner.device == "cuda", _raised("learner.microbatch_tokens")),
        ),
        Advice("lower pipeline_depth, since running ahead only ages the data", _lowered("pipeline_depth")),
    ),
    "signal": (
        Advice("choose tasks in envs.mix that the policy solves sometimes", lambda run: {}),
        Advice("raise rollout.group_size", _raised("rollout.group_size")),
    ),
    "prm": (
        Advice(
            "raise prm.num_threads",
            _where(_prm_on_cpu, _raised("prm.num_threads")),
        ),
        Advice(
            "set prm.device=cuda",
            _where(
                lambda run: run.reward.prm is not None and run.prm.device == "cpu", lambda run: {"prm.device": "cuda"}
            ),
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
            _raised("rollout.engine.max_num_seqs"),
        ),
        Advice("raise pipeline_depth where places are free; max_staleness is its bound", _further_ahead),
        _WORKERS,
    ),
    "engine": (
        _WORKERS,
        Advice("shorten turns with rollout.max_turn_tokens", _lowered("rollout.max_turn_tokens")),
        Advice(
            "raise rollout.engine.kv_cache_gib where many tokens are computed again",
            _raised("rollout.engine.kv_cache_gib"),
        ),
        Advice(
            "raise pipeline_depth where many places of a GPU are unused; max_staleness is its bound",
            _where(lambda run: run.rollout.engine.device == "cuda", _further_ahead),
        ),
    ),
    "admission": (_AHEAD,),
    "balanced": (_WORKERS, _LEARNER_THREADS),
}
