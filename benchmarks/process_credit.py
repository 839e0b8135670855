"""What step scores know, on the recorded attempts of a run, without RL.

    python -m benchmarks.process_credit RUN

RUN is of generated tasks. Its train steps are gone through in order, like in training. Intervals are bootstrapped over
tasks.

    order, weights  by scorer and family: of the pairs of siblings that decided differently in one state (the same
                    prompt, token for token) and ended differently, the share that the scorer orders like the outcomes
                    (a tie counts half), and the weight that it earned before each train step, of 1

The scorers are those of `benchmarks.scorers`.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scorers import SCORERS
from learner.credit import share_in_order
from reward.prm.evidence import family_of, step_weights
from reward.prm.quality import Statistic, clustered_interval
from rollout.codec import read_trajectories
from rollout.types import Group, Trajectory

Steps = Mapping[int, Sequence[Group]]
"""The groups of each train step."""


def measured(statistic: Statistic, tasks: Sequence[str], *columns: Sequence[float]) -> dict[str, Any]:
    arrays = [np.array(column, dtype=float) for column in columns]
    interval = clustered_interval(statistic, tasks, arrays, seed=0)
    return {"value": statistic(*arrays), "ci95": interval, "num": len(tasks)}


def of_scorer(steps: Steps, score: Callable[[Trajectory], Sequence[float | None]]) -> dict[str, Any]:
    """Score all turns; return by family the share of pairs in order and the weight before each train step."""
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    weights: dict[str, list[float]] = defaultdict(list)
    rows: list[dict[str, float]] = []
    for groups in steps.values():
        for family, weight in step_weights(rows, 1.0).items():
            weights[family].append(round(weight, 2))
        found = defaultdict(list)
        for group in groups:
            for attempt in group.trajectories:
                for turn, value in zip(attempt.planner_turns, score(attempt), strict=True):
                    turn.score = value
            if (share := share_in_order(group)) is not None:
                task = group.trajectories[0].task
                found[family_of(task.dataset)].append(share)
                shares[family_of(task.dataset)][task.id] = share
        rows.append({f"prm/order/{family}": statistics.mean(values) for family, values in found.items()})
        rows[-1] |= {f"prm/order_groups/{family}": len(values) for family, values in found.items()}
    return {
        family: {
            "order": measured(lambda column: float(column.mean()), list(of_tasks), list(of_tasks.values())),
            "weights": weights[family],
        }
        for family, of_tasks in shares.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    made: dict[int, dict[str, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
    for attempt in read_trajectories(parser.parse_args().run / "trajectories.jsonl"):
        if attempt.step is not None and attempt.total is not None:
            made[attempt.step][attempt.group_id].append(attempt)
    steps = {
        number: [Group(id=name, trajectories=tuple(attempts)) for name, attempts in groups.items()]
        for number, groups in sorted(made.items())
    }
    for name, score in SCORERS.items():
        print(name, json.dumps(of_scorer(steps, lambda one: score(one.task, one.answer, one.planner_turns))))  # noqa: B023


if __name__ == "__main__":
    main()
