"""What the RL loop watches of its process reward model: canaries, and its error against the plan."""

from collections.abc import Iterable
from contextlib import suppress
from statistics import fmean

import ray

from ray_jobs.phases.train_prm import highest
from ray_jobs.run.run import Run
from reward.labels.labels import LabelError
from reward.labels.plan import plan_scores
from reward.prm.step_text import step_texts
from reward.types import ScoredGroup


def watch_prm(run: Run, groups: Iterable[ScoredGroup], step: int, prm_weight: float) -> dict[str, float]:
    """Metrics for the alarms, over every group of the batch that the PRM scored: its weight, the junk that it must see
    through, its error against the plan. Without a PRM no group is asked for."""
    if run.actors.prm is None or run.config.reward.prm is None:
        return {}
    scored = [group for group in groups if group.step_scores is not None]
    if not scored:
        return {}
    metrics = {"prm/weight": prm_weight}
    if step % run.config.reward.prm.alarms.window == 0:
        firsts = [step_texts(group.group.trajectories[0])[0] for group in scored]
        # A PRM that died is being started again; its canaries wait for the next window.
        with suppress(ray.exceptions.RayActorError):
            found = ray.get([run.actors.prm.score_canaries.remote(first) for first in firsts])
            worst = highest(score for scores in found for score in scores.values())
            metrics |= {} if worst is None else {"prm/canary_max": worst}
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
