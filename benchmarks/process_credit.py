"""What step scores and the critic of `reward.credit.all_wrong` know, on the recorded attempts of a run, without RL.

    python -m benchmarks.process_credit RUN

RUN is of generated tasks, with outcome credit alone. Its train steps are gone through in order, like in training.

    scorers  of the pairs of siblings that decided differently in one state (the same prompt, token for token) and ended
             differently, the share that a scorer orders like the outcomes (a tie counts half), and the weight that it
             earns at each train step, of 1. `gain` is the value of the critic after a step minus the one before;
             the other scorers are those of `benchmarks.scorers`
    critic   AUROC of the critic's value for the outcome, over all states
    wrong    AUROC of the gain for right steps by the plan, in groups without a right attempt

The critic values the attempts of a step, then learns from their outcomes. Its states are those of the policy that RL
began with. Steps that end an attempt have no gain, because their outcome is known. All intervals are bootstrapped over
tasks.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch

from benchmarks.scorers import SCORERS
from configs.loading import load_run_config
from learner.credit import share_in_order
from learner.critic import Critic
from learner.policy import Policy
from ray_jobs.run.model_folder import resolve_model
from reward.labels.plan import plan_scores
from reward.prm.evidence import family_of, step_weights
from reward.prm.quality import RIGHT, Statistic, auroc, clustered_interval
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
    run = parser.parse_args().run
    config = load_run_config(run / "config.json", [])
    policy = Policy(resolve_model(config.model.path), config.model, config.learner, seed=config.seed)
    (adapter,) = (run / "cold_start").glob("v*/adapter.safetensors")
    policy.load_adapter_state(safetensors.torch.load(adapter.read_bytes()))
    critic = Critic(policy, microbatch_tokens=config.learner.microbatch_tokens)
    made: dict[int, dict[str, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
    for attempt in read_trajectories(run / "trajectories.jsonl"):
        if attempt.step is not None and attempt.total is not None:
            made[attempt.step][attempt.group_id].append(attempt)
    steps = {
        number: [Group(id=name, trajectories=tuple(attempts)) for name, attempts in groups.items()]
        for number, groups in sorted(made.items())
    }
    gains: dict[str, list[float | None]] = {}
    known, wrong = [], []
    for number, groups in steps.items():
        values = critic.values(groups)
        for group, attempt in ((one, attempt) for one in groups for attempt in one.trajectories):
            value = values[attempt.id]
            gains[attempt.id] = [*(then - here for here, then in pairwise(value)), None]
            if number == min(steps):
                continue  # The critic knew nothing yet.
            known += [(attempt.task.id, here, float(attempt.outcome == 1)) for here in value]
            if not any(group.outcomes):
                by_plan = plan_scores(attempt.task, attempt.planner_turns)
                wrong += [
                    (attempt.task.id, gain, float(label > RIGHT))
                    for gain, label in zip(gains[attempt.id], by_plan, strict=True)
                    if gain is not None
                ]
    scorers: dict[str, Callable[[Trajectory], Sequence[float | None]]] = {
        name: lambda attempt, score=score: score(attempt.task, attempt.answer, attempt.planner_turns)
        for name, score in SCORERS.items()
    }
    scorers["gain"] = lambda attempt: gains[attempt.id]
    result = {
        "scorers": {name: of_scorer(steps, score) for name, score in scorers.items()},
        "critic": measured(auroc, *zip(*known, strict=True)),
        "wrong": measured(auroc, *zip(*wrong, strict=True)) if wrong else None,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
