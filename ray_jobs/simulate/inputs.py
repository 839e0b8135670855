"""What a simulation takes for granted: from an earlier run's folder, or assumed."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from configs.loading import ConfigError
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


def simulation_inputs(options: argparse.Namespace) -> SimulationInputs:
    """Of the run folder where one is named. Raises ConfigError."""
    inputs = _measured(options) if options.run_folder else _assumed(options)
    if inputs.step_s <= 0 or inputs.sync_s < 0:
        raise ConfigError(f"--step-s must be above 0 and --sync-s not below, got {inputs.step_s:g}, {inputs.sync_s:g}")
    return inputs


def _assumed(options: argparse.Namespace) -> SimulationInputs:
    tasks, shape = _distribution(options, _shares(options))
    step_s, sync_s = _or(options.step_s, STEP_S), _or(options.sync_s, SYNC_S)
    said = f"assumed: {shape}, {_or(options.signal, SIGNAL):.0%} of them with signal; {_clocks(step_s, sync_s)}"
    return SimulationInputs(tasks=tasks, step_s=step_s, sync_s=sync_s, said=said)


def _shares(options: argparse.Namespace) -> Mapping[Fate, float]:
    """What is not said to be anything else is all wrong."""
    signal, all_right, failed = _or(options.signal, SIGNAL), _or(options.all_right, 0.0), _or(options.failed, 0.0)
    if signal <= 0 or min(all_right, failed) < 0 or (rest := 1 - signal - all_right - failed) < -1e-9:
        raise ConfigError(
            "--signal must be above 0, --all-right and --failed not below, all three together at most 1, "
            f"got {signal:g}, {all_right:g}, {failed:g}"
        )
    return {"signal": signal, "all_right": all_right, "failed": failed, "all_wrong": max(0.0, rest)}


def _distribution(options: argparse.Namespace, shares: Mapping[Fate, float]) -> tuple[TaskSource, str]:
    median_s, sigma, alpha = _or(options.median_s, MEDIAN_S), _or(options.sigma, SIGMA), options.alpha
    if median_s <= 0 or sigma < 0 or (alpha is not None and alpha <= 0):
        raise ConfigError("--median-s and --alpha must be above 0, --sigma must not be below")
    if alpha is None:
        tasks: TaskSource = LognormalTasks(median_s=median_s, sigma=sigma, shares=shares)
        return tasks, f"groups of {median_s:g} s in the median, lognormal with sigma {sigma:g}"
    tasks = ParetoTasks(median_s=median_s, alpha=alpha, shares=shares)
    return tasks, f"groups of {median_s:g} s in the median, Pareto with alpha {alpha:g}"


def _measured(options: argparse.Namespace) -> SimulationInputs:
    """All groups of the run that ended, each with the seconds it took; the learner's mean step; the median sync."""
    folder: Path = options.run_folder
    given = [
        name
        for name in ("median_s", "sigma", "alpha", "signal", "all_right", "failed")
        if getattr(options, name) is not None
    ]
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} and --run cannot go together: the run says what groups take")
    groups = _measured_groups(folder)
    step_s = options.step_s if options.step_s is not None else _mean_step_s(folder)
    sync_s = options.sync_s if options.sync_s is not None else _median_sync_s(folder)
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
