"""Right attempts of guided sampling against plain sampling, from one policy.

    agentflow train benchmarks/pages.toml num_steps=0 'reward.credit={type="outcome_guided"}'
    python -m benchmarks.guided --run runs/pages [--tasks 32] [--scores plan,prm,random] [--candidates 64]

The policy is the run's cold start, and the tasks are those of its training. For each data set and task, 16 plain
attempts and two that each kind of scores guides: the run's own PRM, or one of `benchmarks.scorers`. Tokens are all that
were sampled, with those of decisions that were not taken.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from actors.prm import Prm
from benchmarks.scorers import SCORERS
from configs.loading import load_run_config
from configs.reward import OutcomeGuidedConfig
from configs.run import RunConfig
from envs.datasets.sampler import training_tasks
from envs.types import Task
from learner.checkpoint import checkpoints_in
from ray_jobs.held_out import side_by_side
from ray_jobs.run.local import open_policy
from ray_jobs.run.model_folder import prm_base
from reward.prm.model import prm_settings
from reward.scorers import outcome_of
from reward.scorers.custom import CustomTurnScorer
from rollout.filters import SOLVED
from rollout.guide import Guide, ScoreSteps
from rollout.types import Group
from rollout.worker import Worker

PLAIN, GUIDED = 16, 2
"""Attempts at a task of either kind."""
AT_ONCE, LOOKED_AT = 8, 2000
"""Tasks side by side; training tasks among which those of a data set are looked for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a run with a cold start and a PRM")
    parser.add_argument("--tasks", type=int, default=32, help="tasks of each data set")
    parser.add_argument("--scores", default="plan,prm,random")
    parser.add_argument(
        "--candidates", type=int, default=OutcomeGuidedConfig().candidates, help="most samples of a guided decision"
    )
    options = parser.parse_args()
    config = load_run_config(options.run / "config.json", [])
    scorers = {name: scorer_of(name, options.run, config) for name in options.scores.split(",")}
    (cold_start,) = checkpoints_in(options.run / "cold_start")
    sampler = training_tasks(config)
    drawn = [sampler.task(number) for number in range(LOOKED_AT)]
    print("| data set | attempts | right | tasks with a right one | tokens | tokens per such task |")
    print("| --- | --- | --- | --- | --- | --- |")
    with open_policy(config, cold_start) as worker, asyncio.Runner() as runner:
        for dataset in config.envs.mix:
            tasks = [task for task in drawn if task.dataset == dataset][: options.tasks]
            for name, score in {"plain": None, **scorers}.items():
                cells = runner.run(row(worker, tasks, score, options.candidates))
                print(f"| {dataset} | {name} | {cells} |", flush=True)


def scorer_of(name: str, run: Path, config: RunConfig) -> ScoreSteps:
    """Return a scorer of groups by the run's PRM or a function of `benchmarks.scorers`."""
    if name in SCORERS:
        return CustomTurnScorer(f"benchmarks.scorers:{name}", limit_s=config.reward.timeout_s).score_group
    settings = prm_settings(run / "prm", config.prm)
    return Prm(settings, prm_base(settings.model_path), 0, run / "prm").score_group


async def row(worker: Worker, tasks: Sequence[Task], score: ScoreSteps | None, candidates: int) -> str:
    """Return the cells of a line of the table; attempts without a scorer are plain."""

    async def plain(task: Task) -> tuple[Group, int]:
        group = await worker.run_group(task, task.id, PLAIN, "")
        return group, sum(one.num_sampled_tokens for one in group.trajectories)

    async def guided(score: ScoreSteps, task: Task) -> tuple[Group, int]:
        guides = [Guide(task=task, score_steps=score, candidates=candidates) for _ in range(GUIDED)]
        return await worker.run_guided(task, task.id, guides, ""), sum(guide.num_tokens for guide in guides)

    attempt: Callable[[Task], Awaitable[tuple[Group, int]]] = partial(guided, score) if score else plain
    found: list[tuple[int, int, int]] = []

    async def count(task: Task) -> None:
        group, tokens = await attempt(task)
        num_right = sum(outcome_of(one) == SOLVED for one in group.trajectories)
        found.append((num_right, len(group.trajectories), tokens))

    await side_by_side(tasks, count, limit=AT_ONCE)
    right, attempts, tokens = map(sum, zip(*found, strict=True))
    rescued = sum(one > 0 for one, _, _ in found)
    each = f"{tokens / rescued:,.0f}" if rescued else ""
    return f"{right} of {attempts} | {rescued} of {len(tasks)} | {tokens:,} | {each}"


if __name__ == "__main__":
    main()
