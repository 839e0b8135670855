"""Choose D, S and the number of workers: a grid of settings, each played by the run's own rules, in one table."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from configs.errors import UserError
from configs.run import RunConfig
from ray_jobs.metrics.bottleneck import BACKPRESSURE_HIGH, WAIT_HIGH
from ray_jobs.simulate.request import SimulationRequest
from ray_jobs.simulate.simulation import SimulationResult, SimulationSettings, simulate
from ray_jobs.simulate.worker import (
    DrawnTask,
    Fate,
    LognormalTasks,
    MeasuredTasks,
    ParetoTasks,
    TaskSource,
    WorkerSettings,
)
from rollout.buffer import BufferSettings
from rollout.concurrency import Workload
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
USUAL_DEPTHS = (0, 1, 2, 4)
AS_FAST = 0.99
"""A setting with so much of the highest rate is as fast, and fewer workers and less depth decide."""

Knobs = tuple[int, int, int]
"""Number of workers, D, S."""
COLUMNS = ("workers", "D", "S", "traj/s", "learner waits", "workers held", "mean age", "left out", "")
WIDTH = 92
"""Of the table at least: on a narrow terminal it breaks, but nothing of it is left out."""
LEGEND = (
    "learner waits: for a batch; workers held: they have free places and may not run further ahead of the learner",
    "mean age: of trained tokens, in train steps; left out: tokens older than S; --json has every number",
)

Limit = Literal["learner", "admission", "rollouts"]
SAID: dict[Limit, str] = {
    "learner": "the learner limits: it waits for batches {idle:.0%} of its time; more workers or a higher D would add "
    "little, a shorter train step much",
    "admission": "rollouts limit, held back by admission: the learner waits {idle:.0%} of its time, workers with free "
    "places wait {held:.0%} of theirs; a higher D lets them run further ahead",
    "rollouts": "rollouts limit: the learner waits {idle:.0%} of its time, {used:.0%} of the workers' places are used; "
    "more workers or places would help",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting of the grid and what came of it."""

    num_workers: int
    pipeline_depth: int
    max_staleness: int
    result: SimulationResult


def run_simulate(config: RunConfig, asked: SimulationRequest) -> None:
    """Print the grid."""
    inputs = simulation_inputs(asked)
    points = _simulated(_grid(config, asked), config, asked, inputs)
    best = best_point(points, max_mean_staleness=asked.max_mean_staleness, max_masked=asked.max_masked)
    lines = [_verdict(points, best, config), inputs.said, *_hints(points, asked), _rule(asked)]
    if asked.json:
        print(json.dumps(_as_json(points, best, lines), indent=2))
        return
    console = Console(width=max(WIDTH, Console().width))

    def say(*said: str) -> None:
        for line in said:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    say(*lines)
    console.print(_table(points, best, config))
    say(*LEGEND)


def best_point(points: Sequence[Point], *, max_mean_staleness: float, max_masked: float) -> Point | None:
    """By the rule that `_rule` says; None where every setting is out of bounds. A low cap keeps the mean low by masking
    the first steps of what is slow: therefore the second bound."""
    results = ((point, point.result) for point in points)
    fresh = [one for one, found in results if found.staleness_mean <= max_mean_staleness and found.masked <= max_masked]
    fastest = max((point.result.trajectories_per_s for point in fresh), default=0.0)
    fast = [point for point in fresh if point.result.trajectories_per_s >= AS_FAST * fastest]
    return min(fast, key=lambda one: (one.num_workers, one.pipeline_depth, -one.max_staleness), default=None)


def limit(result: SimulationResult) -> Limit:
    """The thresholds are those of a real run's verdict."""
    if result.learner_idle < WAIT_HIGH:
        return "learner"
    return "admission" if result.backpressure >= BACKPRESSURE_HIGH else "rollouts"


# --- what is taken for granted ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationInputs:
    """`said`: all of it in one line."""

    tasks: TaskSource
    step_s: float
    sync_s: float
    said: str


def simulation_inputs(asked: SimulationRequest) -> SimulationInputs:
    """Of the run folder where one is named. Raises UserError."""
    for name, value in asdict(asked).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name.replace('_', '-')} must be a finite number, got {value}")
    inputs = _measured(asked, asked.run) if asked.run else _assumed(asked)
    if inputs.step_s <= 0 or inputs.sync_s < 0:
        raise UserError(f"--step-s must be above 0 and --sync-s not below, got {inputs.step_s:g}, {inputs.sync_s:g}")
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
        raise UserError(
            "--signal must be above 0, --all-right and --failed not below, all three together at most 1, "
            f"got {signal:g}, {all_right:g}, {failed:g}"
        )
    return {"signal": signal, "all_right": all_right, "failed": failed, "all_wrong": max(0.0, rest)}


def _distribution(asked: SimulationRequest, shares: Mapping[Fate, float]) -> tuple[TaskSource, str]:
    median_s, sigma, alpha = _or(asked.median_s, MEDIAN_S), _or(asked.sigma, SIGMA), asked.alpha
    if median_s <= 0 or sigma < 0 or (alpha is not None and alpha <= 0):
        raise UserError("--median-s and --alpha must be above 0, --sigma must not be below")
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
        raise UserError(f"--{given[0].replace('_', '-')} and --run cannot go together: the run says what groups take")
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
        raise UserError(f"'{path}' does not exist; name the folder of a run whose training has begun")
    with readable_ledger(path) as readable, closing(Ledger(readable)) as ledger:
        rows = ledger.durations(ledger.counts.drawn)
    if not any(FATES[state] == "signal" for state, *_ in rows):
        raise UserError(f"no group with signal has ended in '{folder}' yet, so there is nothing to simulate with")
    usual = median(seconds for state, seconds, _ in rows if seconds or state != "failed")
    return [
        DrawnTask(seconds=max(seconds or (usual if state == "failed" else 0.0), 1e-3), fate=FATES[state])
        for state, seconds, _ in rows
    ]


def _mean_step_s(folder: Path) -> float:
    path = folder / "metrics.jsonl"
    rows = read_records(path) if path.exists() else ()
    steps = [row["learner/step_s"] for row in rows if "learner/step_s" in row]
    if not steps:
        raise UserError(f"'{path}' has no train step; say with --step-s what one takes")
    return fmean(steps)


def _median_sync_s(folder: Path) -> float:
    path = folder / "adapters" / "acknowledged.jsonl"
    latencies = [row["latency_s"] for row in read_records(path)] if path.exists() else []
    return median(latencies) if latencies else SYNC_S


def _clocks(step_s: float, sync_s: float) -> str:
    return f"a train step takes {step_s:.3g} s, new weights {sync_s:.3g} s to a worker"


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


# --- playing -----------------------------------------------------------------------------------------


def _grid(config: RunConfig, asked: SimulationRequest) -> list[Knobs]:
    """Every combination that a recipe may have: a cap below the depth is refused there."""
    workers = asked.workers or sorted({config.rollout.num_workers, 2 * config.rollout.num_workers})
    depths = asked.depth or sorted({*USUAL_DEPTHS, config.pipeline_depth})
    caps = asked.cap or (config.max_staleness,)
    if min(workers) < 1:
        raise UserError(f"--workers must be above 0, got {min(workers)}")
    if asked.load_slope < 0:
        raise UserError(f"--load-slope must not be below 0, got {asked.load_slope:g}")
    grid = [knobs for knobs in product(workers, depths, caps) if knobs[2] >= knobs[1]]
    if not grid:
        raise UserError(f"every cap S of {list(caps)} is below every depth D of {list(depths)}: raise --cap")
    return grid


def _simulated(
    grid: Sequence[Knobs], config: RunConfig, asked: SimulationRequest, inputs: SimulationInputs
) -> list[Point]:
    # The bar goes to stderr: what is printed may be piped.
    console = Console(stderr=True)
    shown = track(grid, "simulate", console=console, transient=True, disable=not console.is_terminal)
    return [
        Point(
            num_workers=knobs[0],
            pipeline_depth=knobs[1],
            max_staleness=knobs[2],
            result=simulate(_settings(knobs, config, asked, inputs)),
        )
        for knobs in shown
    ]


def _settings(
    knobs: Knobs, config: RunConfig, asked: SimulationRequest, inputs: SimulationInputs
) -> SimulationSettings:
    num_workers, pipeline_depth, max_staleness = knobs
    return SimulationSettings(
        buffer=BufferSettings(
            batch_groups=config.batch_groups,
            pipeline_depth=pipeline_depth,
            max_staleness=max_staleness,
            max_attempts=config.rollout.max_attempts,
            max_empty_batches=config.max_empty_batches,
        ),
        tasks=inputs.tasks,
        worker=WorkerSettings(
            places=asked.places or Workload(config.rollout, pipeline_depth=pipeline_depth).num_places,
            sync_s=inputs.sync_s,
            load_slope=asked.load_slope,
        ),
        num_workers=num_workers,
        group_size=config.rollout.group_size,
        step_s=inputs.step_s,
        num_steps=asked.steps,
        seed=asked.seed,
    )


# --- saying ------------------------------------------------------------------------------------------


def _rule(asked: SimulationRequest) -> str:
    return (
        "best: the most trained trajectories/s with a mean age of at most "
        f"{asked.max_mean_staleness:g} and at most {asked.max_masked:.0%} of the tokens left out; "
        "of those within 1% of it the fewest workers, then the least D, then the highest S"
    )


def _verdict(points: Sequence[Point], best: Point | None, config: RunConfig) -> str:
    if best is None:
        stale, masked = (min(getattr(one.result, name) for one in points) for name in ("staleness_mean", "masked"))
        return (
            f"no setting is within the bounds: the least mean age is {stale:.2f}, the least share left out {masked:.1%}"
        )
    found = best.result
    said = SAID[limit(found)].format(idle=found.learner_idle, held=found.backpressure, used=found.places_used)
    workers = "1 worker" if best.num_workers == 1 else f"{best.num_workers} workers"
    begun = next((one.result for one in points if _knobs(one) == _recipe(config)), None)
    beside = f" (the recipe: {begun.trajectories_per_s:.2f})" if begun and begun is not found else ""
    rate = f"{found.trajectories_per_s:.2f} trajectories/s{beside}"
    return f"best: {workers}, D={best.pipeline_depth}, S={best.max_staleness}, {rate}. There {said}"


def _hints(points: Sequence[Point], asked: SimulationRequest) -> list[str]:
    if asked.load_slope or len({point.num_workers for point in points}) == 1:
        return []
    return [
        "assumed: groups on one worker do not slow each other down, and workers on one machine neither; --load-slope "
        "says by how much they do"
    ]


def _table(points: Sequence[Point], best: Point | None, config: RunConfig) -> Table:
    title = f"B={config.batch_groups}, G={config.rollout.group_size}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for point in points:
        knobs, recipe = _knobs(point), _recipe(config)
        mark = " ".join(name for name, holds in (("best", point is best), ("recipe", knobs == recipe)) if holds)
        table.add_row(*map(str, knobs), *_cells(point.result), mark, style="bold" if point is best else None)
    return table


def _knobs(point: Point) -> Knobs:
    return point.num_workers, point.pipeline_depth, point.max_staleness


def _recipe(config: RunConfig) -> Knobs:
    return config.rollout.num_workers, config.pipeline_depth, config.max_staleness


def _cells(result: SimulationResult) -> Iterator[str]:
    yield f"{result.trajectories_per_s:#.3g}"
    yield from (f"{share:.0%}" for share in (result.learner_idle, result.backpressure))
    yield f"{result.staleness_mean:.2f}"
    yield f"{result.masked:.1%}"


def _as_json(points: Sequence[Point], best: Point | None, lines: Sequence[str]) -> dict[str, object]:
    return {
        "notes": list(lines),
        "best": None if best is None else points.index(best),
        "limit": None if best is None else limit(best.result),
        "settings": [asdict(replace(point, result=replace(point.result, cohort=()))) for point in points],
    }
