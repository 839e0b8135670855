"""Arms of training against each other: sampled tokens until some families of tasks are solved.

For each seed a recipe is cold-started once. Every arm goes on from a copy of that run, with the same tasks in the same
order. The end point: tokens sampled so far, of all roots and forks, dropped ones too, when the solve rate is at least
the target: that of the roots over the last WINDOW train steps, the mean over the families, or, where the arms do not
draw the same tasks, that of held-out tasks. An arm that does not come there within its train steps is censored and
counts with all it sampled, which is to its advantage. One that does is ended there.

An arm that ended stands as a line in the file of what was measured and is not run again.
"""

import argparse
import json
import math
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.before_rl import copy_before_rl
from configs.loading import load_run_config
from rollout.records import append_record, read_records

ROOT = Path(__file__).parents[1]
WINDOW = 5
LOOK_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """`shared` and each arm's own settings change the recipe; the others are compared with the arm `baseline`.
    `held_out`: the rate is that of `evaluation.every_steps`, for which `shared` has to ask."""

    recipe: Path
    shared: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    baseline: str
    families: tuple[str, ...]
    target: float
    measured: Path
    held_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An arm of a seed: sampled tokens, train steps and seconds of RL until the target, or in all where it was not
    reached; the solve rate after its first WINDOW steps, and its last."""

    seed: int
    arm: str
    tokens: float
    steps: int
    wall_s: float
    reached: bool
    first_rate: float
    last_rate: float


def run(race: Race, description: str) -> None:
    """The command of a benchmark that is such a race."""
    options = _options(race, description)
    for seed in range(options.seeds):
        for arm in options.arms:
            if (seed, arm) not in _measured(race):
                done = _run(race, options, seed, arm)
                race.measured.parent.mkdir(exist_ok=True)
                append_record(race.measured, asdict(done))
            print(_measured(race)[seed, arm], flush=True)
    print(table(race, list(_measured(race).values())))


def _options(race: Race, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--arms", nargs="+", choices=list(race.arms), default=list(race.arms))
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="of the recipe, in every arm")
    return parser.parse_args()


def _measured(race: Race) -> dict[tuple[int, str], Ended]:
    rows = (Ended(**row) for row in read_records(race.measured)) if race.measured.exists() else ()
    return {(row.seed, row.arm): row for row in rows}


def _run(race: Race, options: argparse.Namespace, seed: int, arm: str) -> Ended:
    """Begin the arm, or go on with it where it was cut off. The cold start is a run of its own, without train steps."""
    shared = [*race.shared, *options.set, f"output_dir={options.out}", f"seed={seed}"]
    start, folder = options.out / f"start-{seed}", options.out / f"{arm}-{seed}"
    if not (start / "summary.json").exists():
        _agentflow("train", str(race.recipe), *shared, f"name={start.name}", "num_steps=0")
    if not (folder / "config.json").exists():
        overrides = [*shared, f"name={folder.name}", *race.arms[arm]]
        copy_before_rl(start, folder, load_run_config(race.recipe, overrides))

    def now() -> Ended:
        return ended(race, folder, seed=seed, arm=arm)

    if not (folder / "summary.json").exists() and not now().reached:
        _go_on_until(lambda: now().reached, folder)
    return now()


def _agentflow(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "ray_jobs.cli", *arguments], check=True, cwd=ROOT)


def _go_on_until(reached: Callable[[], bool], folder: Path) -> None:
    """Resume the run, and end it as soon as it has reached the target. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "ray_jobs.cli", "resume", str(folder)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        while process.poll() is None:
            time.sleep(LOOK_EVERY_S)
            if reached():
                process.terminate()
                process.wait()
                return
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def ended(race: Race, folder: Path, *, seed: int, arm: str) -> Ended:
    """Read off the ledger and the metrics of a run that ended."""
    wall_s, first = 0.0, 0.0
    at = Ended(seed=seed, arm=arm, tokens=0.0, steps=0, wall_s=0.0, reached=False, first_rate=0.0, last_rate=0.0)
    if not (folder / "ledger.sqlite").exists():
        return at
    metrics = list(read_records(folder / "metrics.jsonl"))
    seconds = {row["step"]: row["time/step_s"] for row in metrics if "policy/loss" in row}
    held_out = {row["step"]: row["held_out/solve_rate"] for row in metrics if "held_out/solve_rate" in row}
    for step, tokens, trained_on in _curve(folder / "ledger.sqlite", race.families):
        rate = held_out.get(step, at.last_rate) if race.held_out else trained_on
        wall_s += seconds.get(step, 0.0)
        reached = rate >= race.target
        first = rate if step == WINDOW else first
        at = replace(at, tokens=tokens, steps=step, wall_s=round(wall_s, 1), reached=reached)
        at = replace(at, first_rate=round(first, 4), last_rate=round(rate, 4))
        if at.reached:
            break
    return at


def _curve(ledger: Path, families: Sequence[str]) -> Iterator[tuple[int, float, float]]:
    """Of each train step: its number, all tokens sampled by then, and the solve rate of roots over the last WINDOW
    steps, the mean over these families; 0 where one of them had none, and before there were so many steps."""
    db = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)
    rows = db.execute(
        "SELECT reported_step, family, num_right, num_scored, facts FROM groups WHERE reported_step IS NOT NULL "
        "ORDER BY reported_step"
    ).fetchall()
    db.close()
    last_step = max((row[0] for row in rows), default=0)
    sampled = dict.fromkeys(range(1, last_step + 1), 0.0)
    ended = {family: dict.fromkeys(sampled, (0.0, 0)) for family in families}
    for step, family, right, scored, facts in rows:
        counted = json.loads(facts or "{}")
        sampled[step] += counted.get("sampled_tokens", 0.0) + counted.get("fork_tokens", 0.0)
        if family in ended and scored:
            before = ended[family][step]
            ended[family][step] = before[0] + right, before[1] + scored
    tokens = 0.0
    for step, of_step in sampled.items():
        tokens += of_step
        yield step, tokens, _rate(ended, range(step - WINDOW + 1, step + 1))


def _rate(ended: Mapping[str, Mapping[int, tuple[float, int]]], steps: range) -> float:
    """`ended`: right and scored attempts of each family, by step."""
    if steps[0] < 1:
        return 0.0
    sums = [[sum(by_step[step][part] for step in steps) for part in (0, 1)] for by_step in ended.values()]
    return statistics.mean(right / scored for right, scored in sums) if all(scored for _, scored in sums) else 0.0


def table(race: Race, rows: Sequence[Ended]) -> str:
    """Each arm's tokens by seed and, paired with the baseline, how many times fewer: the mean of the log ratios with
    Student's t over the seeds that both arms have."""
    by_arm = {arm: {row.seed: row for row in rows if row.arm == arm} for arm in race.arms}
    lines = [
        "| arm | tokens to the target, thousands, by seed "
        f"| times fewer than `{race.baseline}`, 95% interval | wall s, mean |",
        "| --- | --- | --- | --- |",
    ]
    for arm, found in by_arm.items():
        if not found:
            continue
        tokens = ", ".join(f"{'' if row.reached else '> '}{row.tokens / 1000:.0f}" for row in found.values())
        logs = [
            math.log(by_arm[race.baseline][seed].tokens / row.tokens)
            for seed, row in found.items()
            if seed in by_arm[race.baseline]
        ]
        wall_s = statistics.mean(row.wall_s for row in found.values())
        lines.append(f"| `{arm}` | {tokens} | {'' if arm == race.baseline else _ratio(logs)} | {wall_s:.0f} |")
    return "\n".join(lines)


T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 11: 2.23, 12: 2.20}
"""Two-sided quantiles of Student's t by the number of seeds."""


def _ratio(logs: Sequence[float]) -> str:
    if not logs:
        return "no seed in common"
    mean = statistics.mean(logs)
    if len(logs) not in T95:
        return f"{math.exp(mean):.2f}x, {len(logs)} seed"
    half = T95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.2f}x ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"
