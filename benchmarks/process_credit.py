"""What the critic of `reward.credit.all_wrong` knows, on the recorded attempts of a run of generated tasks, without RL.

    python -m benchmarks.process_credit RUN

Goes through the train steps of RUN like the learner: values the attempts of a step, then learns from their outcomes.
The states are those of the policy that RL began with. The gain of a step is the value after it minus the one before;
steps that end an attempt are left out, because their outcome is known. All intervals are bootstrapped over tasks.

    critic  AUROC of the value for the outcome, over all states
    order   of the pairs of siblings that decided differently in one state (the same prompt, token for token) and ended
            differently, the share that the gain, or the plan's own label, orders like the outcomes; a tie counts half
    wrong   AUROC of the gain for right steps by the plan, in groups without a right attempt
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch

from configs.loading import load_run_config
from learner.critic import Critic
from learner.policy import Policy
from ray_jobs.run.model_folder import resolve_model
from reward.labels.plan import plan_scores
from reward.prm.quality import RIGHT, Statistic, auroc, clustered_interval
from rollout.codec import read_trajectories
from rollout.types import Group, Trajectory, Turn


@dataclass(eq=False)
class Step:
    """A step that does not end its attempt."""

    attempt: Trajectory
    turn: Turn
    plan: float
    gain: float


def measured(statistic: Statistic, tasks: Sequence[str], *columns: Sequence[float]) -> dict[str, Any]:
    arrays = [np.array(column, dtype=float) for column in columns]
    interval = clustered_interval(statistic, tasks, arrays, seed=0)
    return {"value": statistic(*arrays), "ci95": interval, "num": len(tasks)}


def order(steps: Sequence[Step], name: str) -> dict[str, Any]:
    """Return the share of discordant pairs that a score orders like the outcomes."""
    states = defaultdict(list)
    for step in steps:
        states[step.attempt.group_id, step.turn.prompt].append(step)
    tasks, wins = [], []
    for one, other in (pair for state in states.values() for pair in combinations(state, 2)):
        decided = [step.turn.tool_call or step.turn.text for step in (one, other)]
        outcomes = [step.attempt.outcome or 0.0 for step in (one, other)]
        if decided[0] != decided[1] and outcomes[0] != outcomes[1]:
            ahead = np.sign(getattr(one, name) - getattr(other, name)) * np.sign(outcomes[0] - outcomes[1])
            wins.append((1 + ahead) / 2)
            tasks.append(one.attempt.task.id)
    return measured(lambda column: float(column.mean()), tasks, wins)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    config = load_run_config(run / "config.json", [])
    policy = Policy(resolve_model(config.model.path), config.model, config.learner, seed=config.seed)
    (adapter,) = (run / "cold_start").glob("v*/adapter.safetensors")
    policy.load_adapter_state(safetensors.torch.load(adapter.read_bytes()))
    critic = Critic(policy, microbatch_tokens=config.learner.microbatch_tokens)
    by_step: dict[int, list[Trajectory]] = defaultdict(list)
    for attempt in read_trajectories(run / "trajectories.jsonl"):
        if attempt.step is not None and attempt.total is not None:
            by_step[attempt.step].append(attempt)
    tasks, values, outcomes, steps = [], [], [], []
    for number, attempts in sorted(by_step.items()):
        found = critic.values([Group(id="", trajectories=tuple(attempts))])
        if number == min(by_step):
            continue  # The critic knew nothing yet.
        for attempt in attempts:
            value = found[attempt.id]
            tasks += [attempt.task.id] * len(value)
            outcomes += [float(attempt.outcome == 1)] * len(value)
            values += value
            inner = zip(attempt.planner_turns, plan_scores(attempt), pairwise(value), strict=False)
            steps += [Step(attempt, turn, plan, then - here) for turn, plan, (here, then) in inner]
    solved = {step.attempt.group_id for step in steps if step.attempt.outcome}
    wrong = [step for step in steps if step.attempt.group_id not in solved]
    right = [float(step.plan > RIGHT) for step in wrong]
    result = {
        "critic": measured(auroc, tasks, values, outcomes),
        "order": {name: order(steps, name) for name in ("gain", "plan")},
        "wrong": measured(auroc, [step.attempt.task.id for step in wrong], [step.gain for step in wrong], right),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
