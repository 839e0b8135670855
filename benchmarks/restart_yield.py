"""Where to sample next when all attempts of a group fail: what each place to start from yields, without any RL.

    python -m benchmarks.restart_yield runs/depth --out runs/depth/yield.jsonl [--families three_lookup chain]
        [--groups 60] [--checkpoint runs/depth/checkpoints/step_000010]

A group has G roots, attempts at one task. For each group whose roots are all wrong, every source names an anchor, a
prefix of one of the roots, and F = G forks go on from it; the forks of a group form a node. A node has signal if its
outcomes differ: only then can it be trained on. All sources get the same groups, so that they are compared in pairs.

    new roots   no anchor: G more attempts at the same task
    random      any prefix of any root, drawn evenly
    rule        after the first tool call that worked, of a root drawn from those that have one
    PRM         the deepest prefix of which the PRM passes every turn; ties go to the higher product of scores
    oracle      the same by the labels of the plan: what a perfect PRM would choose

A turn passes the PRM at a threshold of its own for each depth: the one that parts right from other steps best
(Youden's J) on the labelled steps of the run that were held out of the PRM's training.

The policy is a finished run's: its cold start, or with --checkpoint a later one. Every finished group is a line of
--out; what is there is not sampled again. The yield is nodes with signal per 1,000 sampled tokens, replayed tokens not
counted. A replay must repeat the record (same prompts, same results); one that does not is counted and its node left
out.
"""

import argparse
import asyncio
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

import numpy as np

from configs.run import RunConfig
from envs.datasets.generated import rl_task
from envs.types import Task
from ray_jobs.phases.label import labels_of
from ray_jobs.phases.local import LocalPrm, open_policy
from ray_jobs.run.begun import begun_config
from ray_jobs.run.folder import RunPaths
from ray_jobs.statistics import mcnemar_exact, wilson_interval
from reward.collected import CollectedGroups, outcome_of
from reward.labels import read_labels
from reward.labels.plan import plan_scores
from reward.prm.step_text import step_texts
from reward.prm.training import RIGHT, prm_data
from rollout.filters import SOLVED, has_signal
from rollout.records import read_records
from rollout.restarts import after_first_calls, beginnings, most_turns
from rollout.types import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from rollout.worker import Worker

FIRST_ORDINAL = 1_000_000
"""Far beyond what a run draws: its own training tasks are not asked again."""
OPEN_GROUPS = 8
DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Anchor:
    """A place to go on from: the first `num_turns` planner turns of a root."""

    root: int
    num_turns: int


Choose = Callable[[TrajectoryGroup, Sequence[Sequence[float]], random.Random], Anchor | None]


# --- sources of anchors ------------------------------------------------------------------------------


def new_root(group: TrajectoryGroup, scores: Sequence[Sequence[float]], rng: random.Random) -> Anchor | None:
    return Anchor(0, 0)


def random_prefix(group: TrajectoryGroup, scores: Sequence[Sequence[float]], rng: random.Random) -> Anchor | None:
    """Any prefix that leaves a turn to sample."""
    return _drawn(beginnings(group), group, rng)


def after_first_call(group: TrajectoryGroup, scores: Sequence[Sequence[float]], rng: random.Random) -> Anchor | None:
    return _drawn(after_first_calls(group), group, rng)


def deepest_passed(group: TrajectoryGroup, scores: Sequence[Sequence[float]], rng: random.Random) -> Anchor | None:
    """By scores that are at least 0 where a turn passes and negative where it does not."""
    found: list[tuple[int, float, int]] = []
    for root, most in enumerate(map(most_turns, group.trajectories)):
        passed = scores[root][:most]
        depth = next((at for at, score in enumerate(passed) if score < 0), len(passed))
        if depth:
            found.append((depth, math.prod(passed[:depth]), -root))
    if not found:
        return None
    depth, _, root = max(found)
    return Anchor(-root, depth)


def _drawn(places: Iterable[tuple[Trajectory, int]], group: TrajectoryGroup, rng: random.Random) -> Anchor | None:
    anchors = [Anchor(group.trajectories.index(root), num_turns) for root, num_turns in places]
    return rng.choice(anchors) if anchors else None


SOURCES: dict[str, Choose] = {
    "new roots": new_root,
    "random": random_prefix,
    "rule": after_first_call,
    "PRM": deepest_passed,
    "oracle": deepest_passed,
}


# --- scores and their thresholds -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The PRM's score from which a turn passes, by its depth; `pooled` where a depth has no steps of both kinds."""

    by_depth: Mapping[int, float]
    pooled: float

    def passed(self, scores: Sequence[float | None]) -> list[float]:
        """The scores, -1 where a turn does not pass."""
        return [
            -1.0 if score is None or score < self.by_depth.get(depth, self.pooled) else score
            for depth, score in enumerate(scores)
        ]


def calibrated(run: RunPaths, config: RunConfig, prm: LocalPrm) -> Thresholds:
    collected = list(CollectedGroups(run.collected).trajectories())
    labels = labels_of(config.label, read_labels(run.labels))
    held_out = prm_data(collected, labels, held_out_share=config.prm.held_out_share).held_out
    scores = prm.score([one.step for one in held_out])
    known = [
        (one.step.step, score, one.label >= RIGHT)
        for one, score in zip(held_out, scores, strict=True)
        if score is not None
    ]
    by_depth = {depth: [(score, right) for at, score, right in known if at == depth] for depth, _, _ in known}
    found = {depth: youden(rows) for depth, rows in by_depth.items()}
    pooled = youden([(score, right) for _, score, right in known])
    assert pooled is not None, "the held-out steps are all right or all wrong"
    return Thresholds({depth: value for depth, value in sorted(found.items()) if value is not None}, pooled)


def youden(rows: Sequence[tuple[float, bool]]) -> float | None:
    """The threshold of the highest J = sensitivity + specificity - 1; None without both kinds of rows."""
    right = sum(is_right for _, is_right in rows)
    if not 0 < right < len(rows):
        return None

    def j(threshold: float) -> float:
        passed = [is_right for score, is_right in rows if score >= threshold]
        return sum(passed) / right - (len(passed) - sum(passed)) / (len(rows) - right)

    return max(sorted({score for score, _ in rows}), key=j)


# --- sampling --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """What was sampled from one place: `anchor` is None where the source named none."""

    anchor: Anchor | None
    outcomes: tuple[float | None, ...] = ()
    tokens: int = 0
    exact: bool = True

    @property
    def signal(self) -> bool:
        return has_signal(self.outcomes)


async def sample_groups(worker: "Worker", prm: LocalPrm, thresholds: Thresholds, options: argparse.Namespace) -> None:
    done = list(read_records(options.out)) if options.out.exists() else []
    for family in options.families:
        rows = [row for row in done if row["family"] == family]
        ordinals = iter(range(FIRST_ORDINAL + len(rows), FIRST_ORDINAL + options.most))
        dead = sum("nodes" in row for row in rows)

        async def work(family: str = family, ordinals: Iterator[int] = ordinals) -> None:
            nonlocal dead
            for ordinal in ordinals:
                if dead >= options.groups:
                    return
                task = rl_task(family, ordinal=ordinal, seed=options.seed).task
                row = {"family": family, "task": task.id, **await _group(worker, prm, thresholds, task, ordinal)}
                dead += "nodes" in row
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{family}: {dead} of {options.groups} all-wrong groups", flush=True)

        await asyncio.gather(*(work() for _ in range(OPEN_GROUPS)))


async def _group(worker: "Worker", prm: LocalPrm, thresholds: Thresholds, task: Task, ordinal: int) -> dict[str, Any]:
    size = worker._config.rollout.group_size
    group = await worker.run_group(task, f"g{ordinal}", size)
    outcomes = [outcome_of(one) for one in group.trajectories]
    row: dict[str, Any] = {"outcomes": outcomes, "tokens": sum(one.num_sampled_tokens for one in group.trajectories)}
    if any(outcomes) or None in outcomes:
        return row
    by_prm = [thresholds.passed(await asyncio.to_thread(prm.score, step_texts(one))) for one in group.trajectories]
    by_plan = [[score if score >= RIGHT else -1.0 for score in plan_scores(one)] for one in group.trajectories]
    rng = random.Random(f"anchors|{task.id}")
    nodes = {}
    for name, choose in SOURCES.items():
        anchor = choose(group, by_plan if name == "oracle" else by_prm, rng)
        nodes[name] = asdict(await _fork(worker, group, anchor, size))
    return row | {"nodes": nodes}


async def _fork(worker: "Worker", group: TrajectoryGroup, anchor: Anchor | None, count: int) -> Node:
    if anchor is None:
        return Node(None)
    root = group.trajectories[anchor.root]
    forks = await worker.continue_from(root, anchor.num_turns, count)
    return Node(
        anchor,
        tuple(outcome_of(fork) for fork in forks),
        sum(len(turn.completion.token_ids) for fork in forks for turn in fork.planner_turns[anchor.num_turns :]),
        len(forks) == count,
    )


# --- the table -------------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]], family: str) -> str:
    """Yields of one family with 95% intervals, groups drawn anew; the ratio is to new groups of the family, and to new
    roots of the same tasks."""
    own = [row for row in rows if row["family"] == family]
    dead = [row for row in own if "nodes" in row and all(node["exact"] for node in row["nodes"].values())]
    inexact = sum("nodes" in row for row in own) - len(dead)
    right = sum(outcome == SOLVED for row in own for outcome in row["outcomes"])
    attempts = sum(len(row["outcomes"]) for row in own)
    firsts = np.array([(has_signal(row["outcomes"]), row["tokens"]) for row in own], dtype=float)
    lines = [
        f"{family}: {right} of {attempts} roots right ({100 * right / attempts:.2f}%); {len(own)} groups, "
        f"{int(firsts[:, 0].sum())} mixed, {len(dead)} all wrong and forked, {inexact} left out for an inexact replay",
        "",
        "| source | anchors | nodes with signal | depth | tokens a node | nodes with signal per 1,000 tokens | "
        "to new groups | to new roots | PRM alone : this alone |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| new groups | {len(own)} | {int(firsts[:, 0].sum())} = {100 * firsts[:, 0].mean():.0f}% | 0 | "
        f"{firsts[:, 1].mean():.0f} | {_yield(firsts):.3f} | 1 | | |",
    ]
    by_source = {
        name: np.array([(_signal(row, name), row["nodes"][name]["tokens"]) for row in dead], dtype=float)
        for name in SOURCES
    }
    for name, nodes in by_source.items():
        depths = [row["nodes"][name]["anchor"]["num_turns"] for row in dead if row["nodes"][name]["anchor"]]
        low, high = wilson_interval(nodes[:, 0].sum(), len(nodes))
        mine, theirs = (
            int((one[:, 0] * (1 - other[:, 0])).sum())
            for one, other in ((by_source["PRM"], nodes), (nodes, by_source["PRM"]))
        )
        against = f"{mine} : {theirs}, p = {mcnemar_exact(mine, theirs):.2g}" if name != "PRM" else ""
        lines.append(
            f"| {name} | {len(depths)} | {int(nodes[:, 0].sum())} = {100 * nodes[:, 0].mean():.0f}% "
            f"({100 * low:.0f} to {100 * high:.0f}) | {np.mean(depths):.1f} | "
            f"{nodes[:, 1].sum() / max(1, len(depths)):.0f} | {_yield(nodes):.3f} | {_ratio(nodes, firsts)} | "
            f"{_ratio(nodes, by_source['new roots'])} | {against} |"
        )
    return "\n".join(lines)


def _signal(row: Mapping[str, Any], source: str) -> bool:
    return has_signal(row["nodes"][source]["outcomes"])


def _yield(nodes: np.ndarray) -> float:
    tokens = nodes[:, 1].sum()
    return float(1000 * nodes[:, 0].sum() / tokens) if tokens else 0.0


def _ratio(nodes: np.ndarray, others: np.ndarray) -> str:
    """Of two yields, with the 95% interval of the bootstrap over groups; half a node is added to each side, so that a
    source without any has a ratio, too."""
    rng = np.random.default_rng(0)

    def smoothed(of: np.ndarray) -> np.ndarray:
        drawn = of[rng.integers(len(of), size=(DRAWS, len(of)))].sum(axis=1)
        return (drawn[:, 0] + 0.5) / (drawn[:, 1] + 1)

    low, high = np.percentile(smoothed(nodes) / smoothed(others), (2.5, 97.5))
    value = _yield(nodes) / _yield(others) if _yield(others) else math.inf
    return f"{value:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    options = _options()
    config = begun_config(options.run)
    run = RunPaths(options.run)
    prm = LocalPrm(config)
    prm.load(run.prm)
    thresholds = calibrated(run, config, prm)
    print("thresholds:", {depth: round(value, 3) for depth, value in thresholds.by_depth.items()}, flush=True)
    checkpoint = options.checkpoint or next(run.cold_start.glob("v*"))
    with open_policy(config, checkpoint) as worker:
        asyncio.run(sample_groups(worker, prm, thresholds, options))
    rows = list(read_records(options.out))
    print("\n\n".join(table(rows, family) for family in options.families))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--families", nargs="+", default=["three_lookup", "chain"])
    parser.add_argument("--groups", type=int, default=60, help="all-wrong groups of each family")
    parser.add_argument("--most", type=int, default=1000, help="groups of a family that are drawn at most")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks")
    return parser.parse_args()


if __name__ == "__main__":
    main()
