"""The phases that make a process reward model: collect trajectories, label their steps, train, measure."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import cycle
from statistics import fmean
from typing import Any

import ray

from envs.datasets.module import OwnSources
from envs.datasets.sampler import collection_tasks
from ray_jobs.phases.collect import collect_groups, collection_facts
from ray_jobs.phases.label import label_agreement, label_steps, labelling_passes, split_checks
from ray_jobs.run.console import sentence
from ray_jobs.run.folder import write_json
from ray_jobs.run.run import Run
from reward.collected import CollectedGroups
from reward.labels.labels import LabelError, StepLabel, read_labels
from reward.labels.plan import plan_scores
from reward.prm.quality import evaluate_prm
from reward.prm.step_text import step_texts
from reward.prm.training import num_batches, prm_data
from reward.types import ScoredGroup
from rollout.types import Trajectory


def collect(run: Run) -> list[Trajectory]:
    """Trajectories of the current policy on training tasks, from the run folder where they are there already."""
    store = CollectedGroups(run.folder.collected)
    if run.finished("collect") is None:
        config, workers = run.config, run.cast.workers
        tasks = collection_tasks(
            config.envs, config.collect, seed=config.seed, leak_report=run.folder.leaks, own=OwnSources.of(config)
        )
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
            phase.facts.update(collection_facts(list(store.trajectories())))
        run.console.note(sentence("collected", phase.facts))
    return list(store.trajectories())


def label(run: Run, collected: Sequence[Trajectory]) -> list[StepLabel]:
    """The main labeller on every step, and the Monte-Carlo labeller on a share of them, to compare."""
    config, path = run.config.label, run.folder.labels
    if run.finished("label") is None:
        continue_from = in_turn("continue_from", run.cast.workers)
        passes = labelling_passes(config, collected, continue_from=continue_from, receipts=run.folder.receipts)
        with run.phase("label", total=sum(len(steps) for _, steps in passes)) as phase:
            done = [
                asyncio.run(label_steps(steps, labeller, path, phase.progress.advance)) for labeller, steps in passes
            ]
            failures = [failure for one in done for failure in one.failures]
            phase.facts.update(labeller=config.type, num_labels=sum(len(one.labels) for one in done))
            phase.facts.update(num_unlabelled=len(failures), first_failures=failures[:3])
        run.console.note(sentence("labelled", phase.facts))
    return list(read_labels(path))


def learn_prm(run: Run, collected: Sequence[Trajectory], labels: Sequence[StepLabel]) -> None:
    """Train the PRM on the tasks that are not held out, save it, and write down how good it is on the others."""
    prm, config = run.cast.prm, run.config.prm
    if run.finished("train_prm") is not None:
        ray.get(prm.load.remote(run.folder.prm))
        return
    main, checks = split_checks(run.config.label, labels)
    data = prm_data(collected, main, held_out_share=config.held_out_share)
    total = num_batches(data.train, num_epochs=config.num_epochs, batch_tasks=config.batch_tasks)
    with run.phase("train_prm", total=total) as phase:
        for step, loss in enumerate(prm.train.remote(data.train)):
            value = ray.get(loss)
            run.log_metrics(step, {"train_prm/loss": value})
            phase.progress.advance(loss=value)
        digest = ray.get(prm.save.remote(run.folder.prm, {"num_steps": len(data.train)}))
        quality = evaluate_prm(
            data,
            collected,
            score=lambda steps: ray.get(prm.score.remote(list(steps))),
            seed=run.config.seed,
        )
        quality |= {"digest": digest, "labels": label_agreement(run.config.label, main, checks)}
        write_json(run.folder.quality, quality)
        phase.facts.update(digest=digest, num_steps=len(data.train))
    run.console.note(
        f"PRM on tasks it never saw: Spearman within group {_shown(quality['spearman_within_group'])}, AUROC of the "
        f"outcome {_shown(quality['auroc_outcome'])}, highest canary {_shown(_highest(quality['canaries'].values()))}"
    )


def watch_prm(run: Run, groups: Iterable[ScoredGroup], step: int, prm_weight: float) -> dict[str, float]:
    """Metrics for the alarms, over every group of the batch that the PRM scored: its weight, the junk that it must see
    through, its error against the plan. Without a PRM no group is asked for."""
    if run.cast.prm is None or run.config.reward.prm is None:
        return {}
    scored = [group for group in groups if group.step_scores is not None]
    if not scored:
        return {}
    metrics = {"prm/weight": prm_weight}
    if step % run.config.reward.prm.alarms.window == 0:
        firsts = [step_texts(group.group.trajectories[0])[0] for group in scored]
        # A PRM that died is being started again; its canaries wait for the next window.
        with suppress(ray.exceptions.RayActorError):
            found = ray.get([run.cast.prm.score_canaries.remote(first) for first in firsts])
            highest = _highest(score for scores in found for score in scores.values())
            metrics |= {} if highest is None else {"prm/canary_max": highest}
    errors = [error for group in scored for error in _errors_against_plan(group)]
    return metrics | ({"prm/rejudge_mse": fmean(error**2 for error in errors)} if errors else {})


def _errors_against_plan(scored: ScoredGroup) -> list[float]:
    """The PRM's scores less the plan's, on rollouts of the policy as it is now; none for a task without a plan, for
    only generated ones have it, and a mix may hold others."""
    assert scored.step_scores is not None
    try:
        truths = [plan_scores(trajectory) for trajectory in scored.group.trajectories]
    except LabelError:
        return []
    return [
        score - truth
        for scores, known in zip(scored.step_scores.raw, truths, strict=True)
        for score, truth in zip(scores, known, strict=True)
        if score is not None
    ]


def in_turn(method: str, workers: Sequence[Any]) -> Callable[..., Awaitable[Any]]:
    """A method of the workers, each call to the next one."""
    turn = cycle(workers)

    async def call(*arguments: Any) -> Any:
        return await getattr(next(turn), method).remote(*arguments)

    return call


def _highest(scores: Iterable[float | None]) -> float | None:
    return max((score for score in scores if score is not None), default=None)


def _shown(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.2f}"
