"""What a simulation takes for granted: from an earlier run's folder, or assumed."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from configs.loading import ConfigError
from ray_jobs.simulate.request import SimulationRequest
from ray_jobs.simulate.worker import DrawnTask, Fate, LognormalTasks, MeasuredTasks, ParetoTasks, TaskSource
from rollout.records import read_records
from rollout.store.ledger import Ledger
from rollout.store.ledger_file import readable_ledger

MEDIAN_S, SIGMA, SIGNAL, STEP_S, SYNC_S = 30.0, 1.0, 0.6, 20.0, 1.0
FATES: Mapping[str, Fate] = {
    "ready": "signal",
    "in_batch": "signal",
    "trained": "signal",
    "refused": "signal",
    "expired": "signal",
    "all_right": "all_right",
    "all_wrong": "all_wrong",
    "overlong": "all_wrong",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationInputs:
    """`said`: all of it in one line."""

    tasks: TaskSource
    step_s: float
    sync_s: float
    said: str


def simulation_inputs(asked: SimulationRequest) -> SimulationInputs:
    """Of the run folder where one is named. Raises ConfigError."""
    for name, value in asdict(asked).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} must be a finite number, got {value}")
    inputs = _measured(asked, asked.run) if asked.run else _assumed(asked)
    if inputs.step_s <= 0 or inputs.sync_s < 0:
        raise ConfigError(f"--step-s must be above 0 and --sync-s not below, got {inputs.step_s:g}, {inputs.sync_s:g}")
    return inputs


def _assumed(asked: SimulationRequest) -> SimulationInputs:
    tasks, shape = _distribution(asked, _shares(asked))
    step_s, sync_s = _or(asked.step_s, STEP_S), _or(asked.sync_s, SYNC_S)
    said = f"assumed: {shape}, {_or(asked.signal, SIGNAL):.0%} of them with signal; {_clocks(step_s, sync_s)}"
    return SimulationInputs(tasks=tasks, step_s=step_s, sync_s=sync_s, said=said)


def _shares(asked: SimulationRequest) -> Mapping[Fate, float]:
    """What is not said to be anything else is all wrong."""
    signal, all_right, failed = _or(asked.signal, SIGNAL), _or(asked.all_right, 0.0), _or(asked.failed, 0.0)
    if signal <= 0 or min(all_right, failed) < 0 or (rest := 1 - signal - all_right - failed) < -1e-9:
        raise ConfigError(
            "--signal must be above 0, --all-right and --failed not below, all three together at most 1, "
            f"got {signal:g}, {all_right:g}, {failed:g}"
        )
    return {"signal": signal, "all_right": all_right, "failed": failed, "all_wrong": max(0.0, rest)}


def _distribution(asked: SimulationRequest, shares: Mapping[Fate, float]) -> tuple[TaskSource, str]:
    median_s, sigma, alpha = _or(asked.median_s, MEDIAN_S), _or(asked.sigma, SIGMA), asked.alpha
    if median_s <= 0 or sigma < 0 or (alpha is not None and alpha <= 0):
        raise ConfigError("--median-s and --alpha must be above 0, --sigma must not be below")
    if alpha is None:
        tasks: TaskSource = LognormalTasks(median_s=median_s, sigma=sigma, shares=shares)
        return tasks, f"groups of {median_s:g} s in the median, lognormal with sigma {sigma:g}"
    tasks = ParetoTasks(median_s=median_s, alpha=alpha, shares=shares)
    return tasks, f"groups of {median_s:g} s in the median, Pareto with alpha {alpha:g}"


def _measured(asked: SimulationRequest, folder: Path) -> SimulationInputs:
    """All groups of the run that ended, each with the seconds it took; the learner's mean step; the median sync."""
    given = [
        name
        for name in ("median_s", "sigma", "alpha", "signal", "all_right", "failed")
        if getattr(asked, name) is not None
    ]
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} and --run cannot go together: the run says what groups take")
    groups = _measured_groups(folder)
    step_s = asked.step_s if asked.step_s is not None else _mean_step_s(folder)
    sync_s = asked.sync_s if asked.sync_s is not None else _median_sync_s(folder)
    signal = fmean(group.fate == "signal" for group in groups)
    median_s = median(group.seconds for group in groups)
    said = (
        f"measured in {folder}: {len(groups)} groups of {median_s:.3g} s in the median, "
        f"{signal:.0%} of them with signal; {_clocks(step_s, sync_s)}"
    )
    return SimulationInputs(tasks=MeasuredTasks(groups=groups), step_s=step_s, sync_s=sync_s, said=said)


def _measured_groups(folder: Path) -> Sequence[DrawnTask]:
    """A group that failed for good has no seconds in the ledger: it is given the median of the others."""
    path = folder / "ledger.sqlite"
    if not path.exists():
        raise ConfigError(f"'{path}' does not exist; name the folder of a run whose training has begun")
    with readable_ledger(path) as readable, closing(Ledger(readable)) as ledger:
        rows = ledger.durations(ledger.counts.drawn)
    if not any(FATES[state] == "signal" for state, *_ in rows):
        raise ConfigError(f"no group with signal has ended in '{folder}' yet, so there is nothing to simulate with")
    return [DrawnTask(seconds=max(seconds, 1e-3), fate=FATES[state]) for state, seconds, _ in rows]


def _mean_step_s(folder: Path) -> float:
    path = folder / "metrics.jsonl"
    rows = read_records(path) if path.exists() else ()
    steps = [row["learner/step_s"] for row in rows if "learner/step_s" in row]
    if not steps:
        raise ConfigError(f"'{path}' has no train step; say with --step-s what one takes")
    return fmean(steps)


def _median_sync_s(folder: Path) -> float:
    path = folder / "adapters" / "acknowledged.jsonl"
    latencies = [row["latency_s"] for row in read_records(path)] if path.exists() else []
    return median(latencies) if latencies else SYNC_S


def _clocks(step_s: float, sync_s: float) -> str:
    return f"a train step takes {step_s:.3g} s, new weights {sync_s:.3g} s to a worker"


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
