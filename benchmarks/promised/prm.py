"""What the pages promise of the process reward model (PRM), of its intervals, and of answers that are numbers."""

import math
import random
import time
from collections.abc import Callable

import numpy as np
from reward.prm.metrics import clustered_interval

from benchmarks.promised.promise import Measured, Promise
from configs.reward import AlarmConfig
from reward.prm.alarms import HackingMonitor
from reward.scorers.math import LIMIT_S, score_math
from tests.reward.padding_world import monitored, train

HEALTHY, HOSTILE = 0.85, (0.95, 1.0)
RUNS = 3
WEIGHT = 0.5
NUM_TASKS, EVALUATIONS, COVERAGE = 16, 2500, 0.93
NUM_TOWERS = 40
_WORLDS: dict[str, tuple[Callable[[np.random.Generator], np.ndarray], float]] = {
    "normal": (lambda rng: rng.normal(0.7, 0.18, NUM_TASKS), 0.7),
    "squared errors": (
        lambda rng: ((rng.normal(0, 0.2, (NUM_TASKS, 1)) + rng.normal(0, 0.2, (NUM_TASKS, 11))) ** 2).mean(axis=1),
        0.08,
    ),
    "heavy tail": (lambda rng: rng.lognormal(0, 0.8, NUM_TASKS), math.exp(0.32)),
}
"""What one evaluation measures of each task, and its expectation."""


def measure_takeover(seed: int) -> Measured:
    """Runs in the small known world, with the alarms in the loop."""
    found = {padding: [_watched(padding, seed * RUNS + run) for run in range(RUNS)] for padding in (HEALTHY, *HOSTILE)}
    text = "; ".join(
        f"padding {padding:g}: accuracy {min(accuracy for accuracy, _ in runs):.2f} or more, alarms "
        + ", ".join(str(alarms) for _, alarms in runs)
        for padding, runs in found.items()
    )
    right = all(accuracy >= 0.9 for runs in found.values() for accuracy, _ in runs)
    quiet = not any(alarms for _, alarms in found[HEALTHY])
    seen = all(alarms for padding in HOSTILE for _, alarms in found[padding])
    return Measured(text, holds=right and quiet and seen)


def measure_intervals(seed: int) -> Measured:
    """Evaluations on the demo's number of held-out tasks, in three worlds whose truth is known."""
    rng, names = np.random.default_rng(seed), [str(task) for task in range(NUM_TASKS)]
    held = dict.fromkeys(_WORLDS, 0)
    for name, (draw, truth) in _WORLDS.items():
        for one in range(EVALUATIONS):
            interval = clustered_interval(np.mean, names, [draw(rng)], seed=seed + one, num_draws=200)
            held[name] += interval is not None and interval[0] <= truth <= interval[1]
    coverage = {name: count / EVALUATIONS for name, count in held.items()}
    # By chance alone, a coverage of exactly 0.93 reads lower than this once in 700 times.
    least = COVERAGE - 3 * math.sqrt(COVERAGE * (1 - COVERAGE) / EVALUATIONS)
    text = ", ".join(f"{name} {share:.3f}" for name, share in coverage.items())
    return Measured(
        f"{text}, of {EVALUATIONS} evaluations each; {COVERAGE:g} less sampling error is {least:.3f}",
        holds=min(coverage.values()) >= least,
    )


def measure_towers(seed: int) -> Measured:
    """Random towers of powers as answers, and an honest one after each, in the time of one that hangs."""
    rng = random.Random(seed)
    towers = [tower(rng) for _ in range(NUM_TOWERS)]
    score_math("2*3", "6")  # the process starts
    started = time.perf_counter()
    scores = [(score_math(text, "3"), score_math("9*3", "27")) for text in towers]
    seconds = time.perf_counter() - started
    wrong = sum(score != (0.0, 1.0) for score in scores)
    return Measured(
        f"{len(towers)} towers such as {min(towers, key=len)}, each with an honest answer after it: {seconds:.2f} s in "
        f"all, {wrong} judged wrongly",
        holds=not wrong and seconds < LIMIT_S,
    )


def tower(rng: random.Random) -> str:
    """Three or four numbers above 8, each the exponent of the one before, in one of the notations."""
    floors = [str(rng.randint(9, 99)) for _ in range(rng.randint(3, 4))]
    brackets, sign = rng.choice((("", ""), ("(", ")"), ("{", "}"))), rng.choice(("^", "**"))
    text = floors.pop()
    while floors:
        text = f"{floors.pop()}{sign}{brackets[0]}{text}{brackets[1]}"
    return rng.choice(("{}", "1/{}", "\\sqrt{{{}}}", "$\\boxed{{{}}}$")).format(text)


def _watched(padding: float, seed: int) -> tuple[float, int]:
    """Accuracy at the end, and the number of alarms."""
    monitor = HackingMonitor(AlarmConfig(), WEIGHT)
    return train(monitored(monitor), padding=padding, seed=seed), len(monitor.alarms)


PROMISES = (
    Promise(
        name="prm-takeover",
        said="Where a PRM likes useless steps as much as useful ones, alarms lower its weight and the policy keeps "
        "solving; a lenient one that still ranks right attempts above wrong ones raises none",
        where="docs/credit.md",
        measure=measure_takeover,
    ),
    Promise(
        name="prm-intervals",
        said="The PRM's 95% intervals over 16 held-out tasks cover at least 0.93",
        where="docs/credit.md",
        measure=measure_intervals,
    ),
    Promise(
        name="math-towers",
        said="A tower of powers as an answer is wrong at once and holds nothing up",
        where="docs/tasks.md",
        measure=measure_towers,
    ),
)
