"""Label the steps of collected trajectories, or say what it would cost."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from configs.run import RunConfig
from ray_jobs.console import Console, sentence
from ray_jobs.labelling import label_steps, labelling_passes
from ray_jobs.preflight import check_labelling
from ray_jobs.recipe_keys import check_judge_key
from ray_jobs.run_folder import run_path
from ray_jobs.single import open_policy
from reward.collected import CollectedGroups
from reward.judge import StepJudge
from rollout.types import Trajectory


class NothingCollectedError(RuntimeError):
    """There are no trajectories to work on; the message says which command makes them."""


def run_label(config: RunConfig, adapter: Path | None, *, dry_run: bool) -> None:
    """Every label is on disk before the next is asked for; steps that are labelled are not labelled again."""
    check_labelling(config)
    check_judge_key(config)
    console, folder = Console(), run_path(config)
    collected = read_collected(folder)
    with _engine(config, adapter, dry_run) as worker:
        passes = labelling_passes(
            config.label,
            collected,
            continue_from=worker.continue_from if worker else _no_engine,
            receipts=folder / "judge_receipts.jsonl",
        )
        for labeller, steps in passes:
            if dry_run:
                console.note(_estimate(config, labeller, len(steps), steps))
                continue
            with console.phase("label", total=len(steps)) as progress:
                done = asyncio.run(label_steps(steps, labeller, folder / "labels.jsonl", progress.advance))
            facts = {"num_labels": len(done.labels), "num_unlabelled": len(done.failures)}
            console.note(sentence(f"labelled by {labeller.name}", facts | {"first_failures": list(done.failures[:3])}))
            if isinstance(labeller, StepJudge):
                console.note(f"spent so far: {labeller.meter.spent}")


def read_collected(folder: Path) -> list[Trajectory]:
    """The trajectories in a run folder. Raises NothingCollectedError."""
    collected = list(CollectedGroups(folder / "collected").trajectories()) if folder.is_dir() else []
    if not collected:
        raise NothingCollectedError(f"'{folder}/collected' holds no trajectories; run `agentflow collect` first")
    return collected


def _engine(config: RunConfig, adapter: Path | None, dry_run: bool) -> AbstractContextManager[Any]:
    """Only Monte-Carlo needs an engine, to go on from a step."""
    needed = config.label.labeller == "monte_carlo" or config.label.check_share > 0
    return open_policy(config, adapter) if needed and not dry_run else nullcontext()


def _estimate(config: RunConfig, labeller: Any, num_steps: int, steps: Sequence[Any]) -> str:
    if isinstance(labeller, StepJudge):
        cost = labeller.estimate(steps)
        return (
            f"{labeller.name}: {num_steps} steps, at most {cost.calls} calls, {cost.input_tokens} tokens in, "
            f"{cost.output_tokens} tokens out, {cost.cost_usd:.4f} US dollars"
        )
    if labeller.name == "monte_carlo":
        return f"monte_carlo: {num_steps} steps, at most {num_steps * config.label.continuations} trajectories, no cost"
    return f"{labeller.name}: {num_steps} steps, no calls, no cost"


async def _no_engine(*_: Any) -> list[Trajectory]:
    raise RuntimeError("this labelling needs no engine, and none was started")
