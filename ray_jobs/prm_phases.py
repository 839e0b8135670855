"""The phases that make a process reward model: collect trajectories, label their steps, train, measure."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import ray

from configs.run import RunConfig
from envs.datasets.collection import collection_tasks
from ray_jobs.collecting import collect_groups
from ray_jobs.labelling import label_steps
from ray_jobs.run import Run
from ray_jobs.run_folder import write_json
from reward.collected import CollectedGroups, outcome_of
from reward.judge import StepJudge
from reward.labels import Labeller, StepLabel, read_labels
from reward.monte_carlo import MonteCarloLabeller
from reward.plan_labels import PlanLabeller, plan_scores
from reward.prm_evaluation import evaluate_prm
from reward.prm_quality import agreement
from reward.prm_training import held_out_tasks, num_batches, prm_data
from reward.step_text import StepText, step_texts
from reward.types import ScoredGroup
from rollout.types import Trajectory


def collect(run: Run) -> list[Trajectory]:
    """Trajectories of the current policy on training tasks, from the run folder where they are there already."""
    store = CollectedGroups(run.folder.collected)
    if run.finished("collect") is None:
        config, workers = run.config, run.cast.workers
        tasks = collection_tasks(config.envs, config.collect, seed=config.seed, leak_report=run.folder.leaks)
        with run.phase("collect", total=len(tasks)) as phase:
            asyncio.run(
                collect_groups(
                    tasks,
                    store,
                    config.collect,
                    in_turn("collect", workers),
                    phase.progress.advance,
                )
            )
            collected = list(store.trajectories())
            phase.facts.update(
                num_tasks=len({one.task.id for one in collected}),
                num_trajectories=len(collected),
                num_steps=sum(len(one.planner_turns) for one in collected),
                num_malformed=sum(one.num_format_errors for one in collected),
                num_right=sum(outcome_of(one) == 1.0 for one in collected),
            )
        run.console.note(_sentence("collected", phase.facts))
    return list(store.trajectories())


def label(run: Run, collected: Sequence[Trajectory]) -> list[StepLabel]:
    """The main labeller on every step, and the Monte-Carlo labeller on a share of them, to compare."""
    config, path = run.config.label, run.folder.labels
    steps = [step for trajectory in collected for step in step_texts(trajectory)]
    checked = _checked_steps(run.config, steps)
    if run.finished("label") is None:
        with run.phase("label", total=len(steps) + len(checked)) as phase:
            main = build_labeller(run.config, collected, run.cast.workers, run.folder.receipts)
            advance = phase.progress.advance
            failures = [*asyncio.run(label_steps(steps, main, path, advance)).failures]
            if checked:
                monte_carlo = _monte_carlo(run.config, collected, run.cast.workers)
                failures += asyncio.run(label_steps(checked, monte_carlo, path, advance)).failures
            phase.facts.update(num_labels=len(steps) + len(checked) - len(failures), num_unlabelled=len(failures))
            phase.facts.update(labeller=config.labeller, first_failures=failures[:3])
        run.console.note(_sentence("labelled", phase.facts))
    return list(read_labels(path))


def build_labeller(
    config: RunConfig, collected: Sequence[Trajectory], workers: Sequence[Any], receipts: Path
) -> Labeller:
    match config.label.labeller:
        case "plan":
            return PlanLabeller(collected)
        case "monte_carlo":
            return _monte_carlo(config, collected, workers)
    assert config.label.judge is not None
    return StepJudge(config.label.judge, receipts=receipts)


def learn_prm(run: Run, collected: Sequence[Trajectory], labels: Sequence[StepLabel]) -> None:
    """Train the PRM on the tasks that are not held out, save it, and write down how good it is on the others."""
    prm, config = run.cast.prm, run.config.prm
    if run.finished("train_prm") is not None:
        ray.get(prm.load.remote(run.folder.prm))
        return
    main = [label for label in labels if not _is_check(run.config, label)]
    data = prm_data(collected, main, held_out_share=config.held_out_share)
    total = num_batches(data.train, num_epochs=config.num_epochs, batch_tasks=config.batch_tasks)
    with run.phase("train_prm", total=total) as phase:
        for step, loss in enumerate(prm.train.remote(data.train)):
            value = ray.get(loss)
            run.folder.log_metrics(step, {"train_prm/loss": value})
            phase.progress.advance(loss=value)
        digest = ray.get(prm.save.remote(run.folder.prm, {"num_steps": len(data.train)}))
        quality = evaluate_prm(
            data,
            collected,
            score=lambda steps: ray.get(prm.score.remote(list(steps))),
            seed=run.config.seed,
        )
        quality |= {"digest": digest, "labels": _agreements(run.config, labels)}
        write_json(run.folder.quality, quality)
        phase.facts.update(digest=digest, num_steps=len(data.train))
    run.console.note(
        f"PRM on tasks it never saw: Spearman within group {_shown(quality['spearman_within_group'])}, AUROC of the "
        f"outcome {_shown(quality['auroc_outcome'])}, highest canary {_shown(_highest(quality['canaries'].values()))}"
    )


def watch_prm(run: Run, scored: ScoredGroup, step: int, prm_weight: float) -> dict[str, float]:
    """Metrics for the alarms: the PRM's weight, the junk it must see through, its error on a fresh group."""
    if run.cast.prm is None or scored.step_scores is None:
        return {}
    metrics = {"prm/weight": prm_weight}
    if step % run.config.reward.alarms.window == 0:
        first = step_texts(scored.group.trajectories[0])[0]
        highest = _highest(ray.get(run.cast.prm.score_canaries.remote(first)).values())
        metrics |= {} if highest is None else {"prm/canary_max": highest}
    if run.config.label.labeller == "plan":
        metrics["prm/rejudge_mse"] = _rejudged(scored)
    return metrics


def _rejudged(scored: ScoredGroup) -> float:
    """Mean squared error of the PRM's scores against the plan's, on rollouts of the policy as it is now."""
    assert scored.step_scores is not None
    errors = [
        (score - truth) ** 2
        for trajectory, scores in zip(scored.group.trajectories, scored.step_scores.raw, strict=True)
        for score, truth in zip(scores, plan_scores(trajectory), strict=True)
        if score is not None
    ]
    return sum(errors) / max(len(errors), 1)


def _monte_carlo(config: RunConfig, collected: Sequence[Trajectory], workers: Sequence[Any]) -> MonteCarloLabeller:
    return MonteCarloLabeller(collected, in_turn("continue_from", workers), continuations=config.label.continuations)


def in_turn(method: str, workers: Sequence[Any]) -> Callable[..., Awaitable[Any]]:
    """A method of the workers, each call to the next one."""
    turn = cycle(workers)

    async def call(*arguments: Any) -> Any:
        return await getattr(next(turn), method).remote(*arguments)

    return call


def _checked_steps(config: RunConfig, steps: Sequence[StepText]) -> list[StepText]:
    """The steps of a share of the tasks, for a second opinion."""
    if config.label.check_share == 0 or config.label.labeller == "monte_carlo":
        return []
    tasks = held_out_tasks((step.task_id for step in steps), share=config.label.check_share)
    return [step for step in steps if step.task_id in tasks]


def _is_check(config: RunConfig, label: StepLabel) -> bool:
    return label.labeller == MonteCarloLabeller.name and config.label.labeller != "monte_carlo"


def _agreements(config: RunConfig, labels: Sequence[StepLabel]) -> dict[str, Any]:
    """How far the labeller and Monte-Carlo say the same of the same steps; empty without a check."""
    check = {(one.trajectory_id, one.step): one.score for one in labels if _is_check(config, one)}
    main = {(one.trajectory_id, one.step): one.score for one in labels if not _is_check(config, one)}
    if not check:
        return {}
    return {
        f"{config.label.labeller}_and_monte_carlo": agreement(
            main, check, task_of=lambda place: place[0].rpartition("/")[0]
        )
    }


def _sentence(done: str, facts: dict[str, Any]) -> str:
    return f"{done}: " + ", ".join(
        f"{name.removeprefix('num_').replace('_', ' ')} {value}" for name, value in facts.items()
    )


def _highest(scores: Iterable[float | None]) -> float | None:
    return max((score for score in scores if score is not None), default=None)


def _shown(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.2f}"
