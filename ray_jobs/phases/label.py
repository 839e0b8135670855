"""Labels of the steps of collected trajectories; no step is labelled, or paid for, twice."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import UserError
from configs.reward import JudgeLabelConfig, LabelConfig, MonteCarloLabelConfig, PlanLabelConfig
from configs.run import RunConfig
from envs.tools.function_tool import own_descriptions
from ray_jobs.phases.collect import CollectedGroups
from ray_jobs.run.console import sentence
from ray_jobs.run.folder import locked
from ray_jobs.run.local import LocalRun
from ray_jobs.run.preflight import check_judge_key, check_labelling
from ray_jobs.side_by_side import side_by_side
from reward.judge_client import Bill
from reward.labels import (
    LabelError,
    Labeller,
    MonteCarloLabeller,
    StepLabel,
    append_label,
    read_labels,
)
from reward.labels.judge import StepJudge, judge_name, rubric_of
from reward.labels.plan import PlanLabeller
from reward.prm.step_text import StepText, step_texts
from rollout.types import Trajectory

if TYPE_CHECKING:
    from ray_jobs.run.run import Run

MAX_OPEN_STEPS = 24
MAX_FAILURES_IN_A_ROW = 20

Step = tuple[str, str, int]
"""The digest of a step's text, its trajectory and its number."""


def labeller_of(run: "Run | LocalRun", collected: Sequence[Trajectory]) -> Labeller:
    """Return the labeller of the recipe. Only Monte Carlo needs an engine, to continue from a step."""
    settings, envs = run.config.label, run.config.envs
    if isinstance(settings, JudgeLabelConfig):
        rubric = rubric_of(envs.actions, own_descriptions(envs))
        return StepJudge(settings.judge, receipts=run.folder.receipts, rubric=rubric)
    if isinstance(settings, MonteCarloLabelConfig):
        continue_from, policy = run.rollouts.continue_from, run.policy
        return MonteCarloLabeller(collected, continue_from, continuations=settings.continuations, policy=policy)
    return PlanLabeller(collected)


def labeller_name(config: LabelConfig) -> str:
    """Return the labeller name in the labels of the recipe's labeller."""
    if isinstance(config, JudgeLabelConfig):
        return judge_name(config.judge)
    return PlanLabeller.name if isinstance(config, PlanLabelConfig) else MonteCarloLabeller.name


def labels_of(config: LabelConfig, labels: Iterable[StepLabel]) -> list[StepLabel]:
    """Return the labels of the recipe's labeller, without those of others."""
    name = labeller_name(config)
    return [label for label in labels if label.labeller == name]


async def label_steps(
    steps: Sequence[StepText], labeller: Labeller, path: Path, on_step: Callable[[], None]
) -> tuple[dict[Step, StepLabel], list[str]]:
    """Label every step without a label of this labeller in `path`, several at a time.

    Return all labels of this labeller, and why steps got none in this pass; the next pass tries those again. An error
    that ends the whole pass (a spent budget, a refused key, MAX_FAILURES_IN_A_ROW) is raised after the labels of all
    started steps are on disk, because they may be paid for.
    """
    known = {_place(label): label for label in read_labels(path) if label.labeller == labeller.name}
    failures: list[str] = []
    in_a_row = 0

    async def label_of(step: StepText) -> None:
        nonlocal in_a_row
        if _place(step) not in known:
            try:
                label = await labeller.label(step)
            except LabelError as error:
                failures.append(str(error))
                in_a_row += 1
                if in_a_row == MAX_FAILURES_IN_A_ROW:
                    raise UserError(
                        f"{in_a_row} steps in a row got no label from {labeller.name}, the last because: {error}; "
                        "labels so far are kept"
                    ) from error
            else:
                append_label(path, label)
                known[_place(step)], in_a_row = label, 0
        on_step()

    await side_by_side(steps, label_of, limit=MAX_OPEN_STEPS)
    return known, failures


def _place(step: StepText | StepLabel) -> Step:
    digest = step.digest if isinstance(step, StepText) else step.text_digest
    return digest, step.trajectory_id, step.step


def label(run: "Run | LocalRun", collected: Sequence[Trajectory], *, dry_run: bool = False) -> list[StepLabel]:
    """Label every step, and return all labels; each is on disk before the next is requested.

    With `dry_run`, only report the work that it would take.
    """
    if run.finished("label") is None:
        steps = [step for trajectory in collected for step in step_texts(trajectory)]
        if dry_run:
            config = run.config.label
            labeller = None if config.type == "monte_carlo" else labeller_of(run, collected)
            bill = labeller.estimate(steps) if isinstance(labeller, StepJudge) else Bill()
            run.console.note(f"{labeller_name(config)}: {len(steps)} steps, at most {_work(config, steps, bill)}")
        else:
            _label_all(run, labeller_of(run, collected), steps)
    return list(read_labels(run.folder.labels))


def _label_all(run: "Run | LocalRun", labeller: Labeller, steps: Sequence[StepText]) -> None:
    config, bill = run.config.label, Bill()
    with run.phase("label", total=len(steps)) as phase:
        labels, failures = asyncio.run(label_steps(steps, labeller, run.folder.labels, phase.advance))
        phase.facts.update(labeller=config.type, num_labels=len(labels))
        phase.facts.update(num_unlabelled=len(failures), first_failures=failures[:3])
        if isinstance(labeller, StepJudge):
            bill = labeller.client.spent
            phase.facts["spent"] = asdict(bill)
    run.console.note(sentence("labelled", {name: phase.facts[name] for name in phase.facts if name != "spent"}))
    labelled = [step for step in steps if _place(step) in labels]
    took = _work(config, labelled, bill)
    run.console.note(f"{labeller.name}: {len(labelled)} of {len(steps)} steps labelled, so far {took}")


def run_label(config: RunConfig, adapter: Path | None, *, dry_run: bool) -> None:
    """Label the steps of the trajectories in `collected/` of the run folder.

    Raises UserError without trajectories, and RunLockError if another process works on the run.
    """
    check_labelling(config)
    check_judge_key(config)
    with LocalRun(config, adapter) as run:
        collected = read_collected(run.folder.path)
        with nullcontext() if dry_run else locked(run.folder.path):
            label(run, collected, dry_run=dry_run)


def read_collected(folder: Path) -> list[Trajectory]:
    """Return the trajectories in a run folder. Raises UserError without any."""
    collected = list(CollectedGroups(folder / "collected").trajectories()) if folder.is_dir() else []
    if not collected:
        raise UserError(f"'{folder}/collected' holds no trajectories; run `agentflow collect` first")
    return collected


def _work(config: LabelConfig, steps: Sequence[StepText], bill: Bill) -> str:
    """Return the work of labelling these steps, worded alike for an estimate and a report."""
    if isinstance(config, JudgeLabelConfig):
        return (
            f"{bill.requests} calls, {bill.input_tokens} tokens in, {bill.output_tokens} tokens out, "
            f"{bill.cost_usd:.4f} US dollars"
        )
    if isinstance(config, MonteCarloLabelConfig):
        # A last step is labelled by its trajectory's own outcome.
        continued = sum(step.step < step.num_steps - 1 for step in steps)
        return f"{continued * config.continuations} trajectories, no cost"
    return "no calls, no cost"
