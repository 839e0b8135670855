"""Asynchronous rollouts against our own synchronous mode, end to end, with slow tools and with instant ones.

    python -m benchmarks.async_vs_sync --out runs/async-vs-sync [--sync-mode both] [--repeats 3] [--steps 12]
        [--tasks 150] [--latency 2.0] [--depths 2,4] [--tools slow,instant] [key=value ...]

What is compared. The RL phase of real runs (Ray actors, vLLM, learner, store, ledger) that differ in one knob:

    async-2    pipeline_depth = 2: rollouts run up to two batches ahead of the learner (any depths with `--depths`).
    sync       pipeline_depth = 0: sample a batch, train on it, sample the next, in lockstep. That is this system's
               synchronous mode, and what makes it bit-reproducible: all trajectories' next turns enter the engine
               together, so every turn waits for the slowest tool of the turn before.
    sync-free  pipeline_depth = 0 without lockstep (rollout.lockstep = false): batches are synchronous, inside one the
               engine batches continuously, as synchronous trainers commonly do. Nobody needs to take lockstep for the
               opponent: `--sync-mode both` measures this one too.

Everything else is equal: code, machine, threads, recipe, cold-started policy (made once in a repetition, whose runs
continue from its files), the sequence of tasks, the number of trajectories per train step (2 groups of 8) and of train
steps. Tasks need one or two searches, then a calculation. Slow tools: a search takes 2 s in the median
(the middle of the 1 to 3 s that hosted search APIs take), lognormal with a heavy tail, 10 s at most, and the same for
the same query in every run (envs.search_latency_s). Modes take turns, and their order rotates from repetition to
repetition; each repetition has a seed, and so tasks and a cold start, of its own. Ratios are taken within a repetition.

What is counted. Trained trajectories per second of the whole RL phase: the asynchronous run's first batch, which
nothing overlaps, and the rollouts that it leaves unfinished at its end count against it: the fewer the steps, the more.
What a long run comes to is the rate without the first step, told beside it. `finished` also counts groups that dynamic
sampling dropped. Learner wait is its share of the loop's time.

Speed must not be bought with a worse policy: after the same number of trained trajectories both modes' policies solve
the same held-out tasks, greedily; 95% Wilson intervals over all repetitions, and the paired difference. The solve
rate while sampling is printed too, but says less: asynchronous samples come from weights that are some steps
older, so while a policy improves theirs must lag, and siblings are not independent, so its interval is too narrow.

What to expect. Engine and learner share the same cores, so overlapping their arithmetic gains next to nothing here:
with instant tools about 1x (bigger decode batches and filled gaps against threads that compete; target 0.95x). Slow
tools leave a synchronous run idle: with C seconds of arithmetic per train step and L of waiting for tools its step
takes C + L, an asynchronous one's C as long as enough groups are in flight, hence (C + L) / C. A deeper pipeline lowers
C itself: a decode step costs nearly the same for 10 sequences as for 30, and most of those in flight wait for a tool.
Several rounds per
batch (dropped groups are replaced) make L large, so does lockstep: it adds up every turn's slowest search, where
sync-free waits for the slowest trajectory (target 2x, against `sync`). The ratio is a property of C and L: larger
batches or a slower machine lower it, slower tools raise it.

Runs that are done are not run again.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.before_rl import copy_before_rl
from configs.loading import load_run_config
from ray_jobs.commands.given import DEFAULT_RECIPE
from ray_jobs.evaluation_folder import Evaluation, evaluation_in
from ray_jobs.statistics import compare_paired, wilson_interval

JOB = (
    "reward.credit=outcome",
    "envs.mix={lookup=0.5, two_lookup=0.5}",
    "envs.choice=mix",
    "batch_groups=2",
    "max_empty_batches=60",
    "cold_start.wrong_share=0.4",
    "evaluation.num_untouched_tasks=0",
)
"""Changes to the demo recipe. Demonstrations are mostly right, so that the cold-started policy does use its tools."""
SYNCHRONOUS = {
    "sync": ("pipeline_depth=0",),
    "sync-free": ("pipeline_depth=0", "rollout.lockstep=false"),
}
SYNC_MODES = {"lockstep": ("sync",), "free": ("sync-free",), "both": ("sync", "sync-free")}
TARGETS = {"slow": 2.0, "instant": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One RL phase in numbers. `steady`: trained trajectories per second without the first train step."""

    trained_per_s: float
    steady_per_s: float
    finished_per_s: float
    learner_wait: float
    staleness: float
    finished: int
    right: int
    held_out: Evaluation
    limit: str


def main() -> None:
    options = _options()
    asynchronous = {f"async-{depth}": (f"pipeline_depth={depth}",) for depth in options.depths}
    modes = {**asynchronous, **{mode: SYNCHRONOUS[mode] for mode in SYNC_MODES[options.sync_mode]}}
    names = list(modes)
    found: dict[tuple[str, str], list[Arm]] = {}
    for repeat in range(options.repeats):
        base = _base(options, repeat)
        for tools in options.tools:
            for place in range(len(names)):
                mode = names[(place + repeat) % len(names)]
                latency = options.latency if tools == "slow" else 0.0
                changes = (f"envs.search_latency_s={latency}", *modes[mode])
                arm = _run(options, base, repeat, f"{tools}-{mode}-{repeat}", changes)
                found.setdefault((tools, mode), []).append(arm)
                print(
                    f"repetition {repeat}, {tools} tools, {mode}: {arm.trained_per_s:.2f} trained trajectories/s, "
                    f"learner waits {arm.learner_wait:.0%}; {arm.limit}",
                    flush=True,
                )
    print(_table(found))
    for tools, fast, slow in product(options.tools, asynchronous, names[len(asynchronous) :]):
        print(_comparison(found[tools, fast], found[tools, slow], f"{tools} tools, {fast} to {slow}", TARGETS[tools]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--sync-mode", choices=SYNC_MODES, default="lockstep")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="train steps of an RL phase")
    parser.add_argument("--tasks", type=int, default=150, help="held-out tasks of a repetition")
    parser.add_argument("--latency", type=float, default=2.0, help="median seconds of a search of the slow tools")
    parser.add_argument(
        "--depths",
        type=lambda text: [int(one) for one in text.split(",")],
        default=[2, 4],
        metavar="D[,D]",
        help="pipeline depths of the asynchronous runs",
    )
    parser.add_argument("--tools", type=lambda text: text.split(","), default=list(TARGETS), metavar="slow,instant")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further changes to the demo recipe")
    return parser.parse_args()


# --- the runs ----------------------------------------------------------------------------------------


def _overrides(options: argparse.Namespace, name: str, *own: str) -> list[str]:
    place = (f"name={name}", f"output_dir={options.out}", f"evaluation.num_tasks={options.tasks}")
    return [*JOB, *place, *options.overrides, *own]


def _base(options: argparse.Namespace, repeat: int) -> Path:
    """The run whose cold start a repetition's others continue from: no train steps, instant tools."""
    name = f"base-{repeat}"
    folder = options.out / name
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _agentflow("train", str(DEFAULT_RECIPE), *_overrides(options, name, f"seed={repeat}", "num_steps=0"))
    return folder


def _run(options: argparse.Namespace, base: Path, repeat: int, name: str, mode: Sequence[str]) -> Arm:
    folder = options.out / name
    if not (folder / "summary.json").exists():
        own = (f"seed={repeat}", f"num_steps={options.steps}", *mode)
        copy_before_rl(base, folder, load_run_config(DEFAULT_RECIPE, _overrides(options, name, *own)))
        _agentflow("resume", str(folder))
    return _arm(folder, load_run_config(DEFAULT_RECIPE, _overrides(options, name)).rollout.group_size)


def _agentflow(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "ray_jobs.cli", *arguments], check=True)


# --- what they say -----------------------------------------------------------------------------------


def _arm(folder: Path, group_size: int) -> Arm:
    phase: dict[str, Any] = json.loads((folder / "phases.json").read_text())["reinforce"]
    facts, seconds = phase["facts"], phase["seconds"]
    rows = [row for row in _lines(folder / "metrics.jsonl") if "policy/loss" in row]
    trained = facts["groups"]["trained"] * group_size
    later_s = sum(row["time/step_s"] for row in rows[1:])
    return Arm(
        trained_per_s=trained / seconds,
        steady_per_s=trained * (len(rows) - 1) / len(rows) / later_s if later_s else float("nan"),
        finished_per_s=facts["num_trajectories"] / seconds,
        learner_wait=sum(row["learner/wait_s"] for row in rows) / sum(row["time/step_s"] for row in rows),
        staleness=facts["staleness"]["mean"],
        finished=round(sum(row["rollout/trajectories"] for row in rows)),
        right=round(sum(row.get("rollout/solve_rate", 0.0) * row["rollout/trajectories"] for row in rows)),
        held_out=evaluation_in(folder, "eval_after"),
        limit=facts["bottleneck"] or "",
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def _table(found: dict[tuple[str, str], list[Arm]]) -> str:
    lines = [
        "| tools | mode | trained/s | without first step | finished/s | learner waits | staleness "
        "| solved while sampling | solved held-out |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (tools, mode), arms in found.items():
        sampled = _rate(sum(arm.right for arm in arms), sum(arm.finished for arm in arms))
        held_out = [right for arm in arms for right in arm.held_out.solved.values()]
        columns = [
            _spread([arm.trained_per_s for arm in arms]),
            _spread([arm.steady_per_s for arm in arms]),
            _spread([arm.finished_per_s for arm in arms]),
            f"{statistics.median(arm.learner_wait for arm in arms):.0%}",
            f"{statistics.median(arm.staleness for arm in arms):.2f}",
            sampled,
            _rate(sum(held_out), len(held_out)),
        ]
        lines.append(f"| {tools} | {mode} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _comparison(fast: Sequence[Arm], slow: Sequence[Arm], name: str, target: float) -> str:
    def ratio(rate: Callable[[Arm], float]) -> str:
        return _spread([rate(one) / rate(other) for one, other in zip(fast, slow, strict=True)])

    arms = zip(slow, fast, strict=True)
    pairs = [pair for one, other in arms for pair in one.held_out.paired_with(other.held_out)]
    paired = compare_paired([one for one, _ in pairs], [other for _, other in pairs])
    same = "equal within the interval" if paired.ci95[0] <= 0 <= paired.ci95[1] else "NOT equal"
    return (
        f"{name}: {ratio(lambda arm: arm.trained_per_s)}x trained trajectories/s (target {target:g}x), "
        f"{ratio(lambda arm: arm.steady_per_s)}x without each run's first step, "
        f"{ratio(lambda arm: arm.finished_per_s)}x finished trajectories/s; "
        f"held-out solve rates {same}: {paired.verdict}"
    )


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _rate(right: int, count: int) -> str:
    low, high = wilson_interval(right, count)
    return f"{right / max(count, 1):.1%} of {count} ({low:.1%} to {high:.1%})"


if __name__ == "__main__":
    main()
