"""Asynchronous rollouts against synchronous modes of the same system, end to end, with slow tools and instant ones.

    python -m benchmarks.async_vs_sync [--repeats 3] [--steps 12] [--tasks 150]
        [--modes async-2,sync] [--tools slow,instant] [--latency 2.0] [key=value ...]

The RL phases of real runs (Ray actors, vLLM, learner) that differ in one setting:

    async-D  pipeline_depth = D: rollouts run up to D batches ahead of the learner.
    sync     pipeline_depth = 0: sample a batch, train on it, sample the next, in lockstep. Every turn waits for the
             slowest tool of the previous turn. This mode is bit-reproducible.

Everything else is equal: code, machine, threads, the cold start (made once per repetition), the sequence of tasks, the
trajectories per train step (2 groups of 8) and the train steps. Tasks need one or two searches and a calculation. A
slow search takes 2 s in the median, lognormal, at most 10 s, and the same for the same query in every run. The modes'
order rotates from repetition to repetition; each repetition has its own seed. Ratios are taken within a repetition.

Counted are trained trajectories per second of the whole RL phase, including the first batch, which nothing overlaps,
and the rollouts left unfinished at the end. The policies are compared on the same held-out tasks, paired. Engine and
learner share the cores, so about 1x is expected with instant tools; with slow tools a synchronous train step takes
C + L (arithmetic and waiting) and an asynchronous one C. Finished runs are not repeated.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runs import compare_after_rl, train, train_steps
from configs.loading import DEFAULT_RECIPE, load_run_config
from ray_jobs.evaluation import evaluation_in
from ray_jobs.statistics import wilson_interval

JOB = (
    "reward.credit=outcome",
    "envs.mix={lookup=0.5, two_lookup=0.5}",
    "batch_groups=2",
    "max_empty_batches=60",
    "cold_start.lazy_share=0.4",
    "evaluation.num_untouched_tasks=0",
    "evaluation.every_steps=0",
    "learner.schedule=constant",
)
"""Changes to the demo recipe. Most demonstrations are right, so that the cold-started policy uses its tools."""


def settings_of(mode: str) -> list[str]:
    """Return the overrides of a mode."""
    if mode == "sync":
        return ["pipeline_depth=0"]
    kind, _, depth = mode.partition("-")
    if kind != "async" or not depth.isdecimal() or int(depth) < 1:
        raise SystemExit(f"mode '{mode}' does not exist; use async-D with D >= 1, or sync")
    return [f"pipeline_depth={depth}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One RL phase in numbers."""

    folder: Path
    trained_per_s: float
    """Trained trajectories per second of the RL phase."""
    learner_wait: float
    """Share of the loop's time in which the learner waits for a batch."""
    staleness: float
    """Mean age of trained tokens, in train steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/async-vs-sync"), help="folder of all runs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="train steps of an RL phase")
    parser.add_argument("--tasks", type=int, default=150, help="held-out tasks of a repetition")
    parser.add_argument("--modes", default="async-2,sync", help="the last one is the reference")
    parser.add_argument("--tools", default="slow,instant")
    parser.add_argument("--latency", type=float, default=2.0, help="median seconds of a search of the slow tools")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further changes to the demo recipe")
    options = parser.parse_args()
    modes, tools = options.modes.split(","), options.tools.split(",")
    arms: dict[tuple[str, str], list[Arm]] = defaultdict(list)
    for repeat in range(options.repeats):
        common = [*JOB, f"evaluation.num_tasks={options.tasks}", *options.overrides, f"seed={repeat}"]
        base = options.out / f"base-{repeat}"
        train(DEFAULT_RECIPE, base, [*common, "num_steps=0"])
        for kind in tools:
            for place in range(len(modes)):
                mode = modes[(place + repeat) % len(modes)]
                latency = f"envs.search_latency_s={options.latency if kind == 'slow' else 0.0}"
                overrides = [*common, f"num_steps={options.steps}", latency, *settings_of(mode)]
                folder = options.out / f"{kind}-{mode}-{repeat}"
                train(DEFAULT_RECIPE, folder, overrides, start_from=base)
                arm = read_arm(folder, load_run_config(DEFAULT_RECIPE, overrides).rollout.group_size)
                arms[kind, mode].append(arm)
                print(f"{folder.name}: {arm.trained_per_s:.2f} trained trajectories/s", flush=True)
    print(table(arms))
    for kind in tools:
        for mode in modes[:-1]:
            print(f"{kind} tools, {mode} to {modes[-1]}: {comparison(arms[kind, mode], arms[kind, modes[-1]])}")


def read_arm(folder: Path, group_size: int) -> Arm:
    """Read the RL phase of a finished run."""
    phase: dict[str, Any] = json.loads((folder / "phases.json").read_text())["reinforce"]
    facts, rows = phase["facts"], train_steps(folder)
    return Arm(
        folder=folder,
        trained_per_s=facts["groups"]["trained"] * group_size / phase["seconds"],
        learner_wait=sum(row["learner/wait_s"] for row in rows) / sum(row["time/step_s"] for row in rows),
        staleness=facts["staleness"]["mean"],
    )


def table(arms: dict[tuple[str, str], list[Arm]]) -> str:
    """Return one row per kind of tools and mode, medians and ranges over the repetitions."""
    lines = [
        "| tools | mode | trained/s | learner waits | staleness | held-out |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (kind, mode), found in arms.items():
        solved = [one for arm in found for one in evaluation_in(arm.folder, "eval_after").solved.values()]
        low, high = wilson_interval(sum(solved), len(solved))
        rate = spread([arm.trained_per_s for arm in found])
        waits = statistics.median(arm.learner_wait for arm in found)
        staleness = statistics.median(arm.staleness for arm in found)
        held_out = f"{statistics.mean(solved):.1%} of {len(solved)} ({low:.1%} to {high:.1%})"
        lines.append(f"| {kind} | {mode} | {rate} | {waits:.0%} | {staleness:.2f} | {held_out} |")
    return "\n".join(lines)


def comparison(fast: Sequence[Arm], slow: Sequence[Arm]) -> str:
    """Return the ratios within a repetition, and the paired comparison of the policies."""
    ratios = [one.trained_per_s / other.trained_per_s for one, other in zip(fast, slow, strict=True)]
    policies = compare_after_rl([arm.folder for arm in slow], [arm.folder for arm in fast])
    return f"{spread(ratios)}x trained trajectories/s; held-out: {policies.verdict}"


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
