"""Quality of a PRM on steps that it was not trained on: agreement with labels and outcomes, calibration, junk."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reward.collected import outcome_of
from reward.prm.decoys import canaries
from reward.prm.step_text import StepText
from reward.prm.training import PrmData
from reward.types import PrmDataError
from rollout.filters import SOLVED
from rollout.types import Trajectory

Array = npt.NDArray[np.float64]
Score = Callable[[Sequence[StepText]], Sequence[float | None]]

NUM_CANARY_CONTEXTS = 8
NUM_BINS = 10
NUM_PICKS = 4
"""Attempts of one group that the PRM picks the best of."""
RIGHT = 0.5
"""Steps with a higher label count as right where right steps are separated from wrong ones."""


def mse(label: Array, pred: Array) -> float:
    """Return the mean of (pred - label)^2."""
    return float(np.mean((pred - label) ** 2))


def average_ranks(values: Array) -> Array:
    """Return ranks from 1; equal values share the mean of their ranks."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks


def spearman(first: Array, second: Array) -> float | None:
    """Return the Pearson correlation of the average ranks; None if one side is constant."""
    a, b = (average_ranks(side) - (len(side) + 1) / 2 for side in (first, second))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else None


def auroc(score: Array, positive: Array) -> float | None:
    """Return the probability that a positive is scored above a negative; None with only one class.

    A tie counts half (Mann-Whitney U divided by the number of pairs).
    """
    right = positive == 1
    num_right, num_wrong = int(right.sum()), int((~right).sum())
    if not num_right or not num_wrong:
        return None
    wins = float(average_ranks(score)[right].sum()) - num_right * (num_right + 1) / 2
    return wins / (num_right * num_wrong)


def ece(label: Array, pred: Array, *, bins: int = NUM_BINS) -> float:
    """Return the expected calibration error over bins of equal mass.

    It is |mean prediction - mean label| of each bin, weighted by the bin's size. Equal predictions share a bin.
    """
    position = np.searchsorted(np.sort(pred), pred, side="right") - 1
    place = np.minimum(position * bins // max(len(pred) - 1, 1), bins - 1)
    gaps = ((place == k).sum() * abs(pred[place == k].mean() - label[place == k].mean()) for k in np.unique(place))
    return float(sum(gaps)) / len(pred)


def best_of_n(score: Array, correct: Array) -> tuple[float, float, float]:
    """Return the expected result of picking by score, at random, and by an oracle. Tied scores share the pick."""
    return float(correct[score == score.max()].mean()), float(correct.mean()), float(correct.max())


def clustered_interval(
    statistic: Callable[..., float | None],
    clusters: Sequence[str],
    columns: Sequence[Array],
    *,
    seed: int,
    num_draws: int = 500,
) -> tuple[float, float] | None:
    """Return the 95% percentile interval of `statistic(*columns)` under a bootstrap of whole clusters.

    Rows of one task are not independent, so tasks are drawn (Efron and Tibshirani 1993, chapter 13). None for fewer
    than two clusters, or if the statistic is undefined in more than half of the draws.
    """
    names, places = np.unique(np.asarray(clusters), return_inverse=True)
    if len(names) < 2:
        return None
    rows = [np.flatnonzero(places == cluster) for cluster in range(len(names))]
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(num_draws):
        drawn = np.concatenate([rows[cluster] for cluster in rng.integers(len(names), size=len(names))])
        if (value := statistic(*(column[drawn] for column in columns))) is not None:
            values.append(value)
    if len(values) <= num_draws / 2:
        return None
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """A held-out planner decision with its label and the PRM's output."""

    task_id: str
    group_id: str
    """Shared by the attempts at one task that were sampled together."""
    trajectory_id: str
    label: float
    """The labeller's score, in [0, 1]."""
    score: float
    """The PRM's raw output, in [0, 1]."""
    outcome: float | None
    """The trajectory's outcome; None if it was never judged."""


def quality_report(steps: Sequence[ScoredStep], *, baseline: float, seed: int) -> dict[str, Any]:
    """Return what the scores of held-out steps say about the PRM; each figure x has its 95% interval as `x_ci95`.

    mse, mse_baseline: squared error against the labels, and that of the constant `baseline`.
    ece: calibration error. auroc_step: right steps against wrong ones.
    spearman_within_group: rank correlation with the labels within each group, averaged.
    auroc_outcome: right against wrong trajectories by the mean score of their steps.
    best_of_4: solved share if the PRM, chance or an oracle picks one of a group's attempts.

    Raises PrmDataError if there are no steps.
    """
    if not steps:
        raise PrmDataError("no held-out step could be scored; raise prm.max_tokens, or collect more tasks")
    labels, scores = np.array([step.label for step in steps]), np.array([step.score for step in steps])
    tasks = [step.task_id for step in steps]

    def measured(
        name: str, statistic: Callable[..., float | None], clusters: Sequence[str], *columns: Array
    ) -> dict[str, Any]:
        value = statistic(*columns) if clusters else None
        interval = clustered_interval(statistic, clusters, columns, seed=seed) if value is not None else None
        return {name: value, f"{name}_ci95": interval}

    groups: dict[tuple[str, str], list[int]] = {}
    trajectories: dict[str, list[int]] = {}
    for row, step in enumerate(steps):
        groups.setdefault((step.task_id, step.group_id), []).append(row)
        trajectories.setdefault(step.trajectory_id, []).append(row)
    correlations = [(task, spearman(labels[rows], scores[rows])) for (task, _), rows in groups.items()]
    defined = [(task, value) for task, value in correlations if value is not None]
    judged = {
        rows[0]: float(scores[rows].mean()) for rows in trajectories.values() if steps[rows[0]].outcome is not None
    }
    means, right = np.array(list(judged.values())), np.array([float(steps[row].outcome == SOLVED) for row in judged])
    by_group: dict[tuple[str, str], list[int]] = {}
    for place, row in enumerate(judged):
        by_group.setdefault((steps[row].task_id, steps[row].group_id), []).append(place)
    picks = {group: best_of_n(means[rows], right[rows]) for group, rows in by_group.items() if len(rows) >= NUM_PICKS}
    picked = np.array(list(picks.values())).reshape(-1, 3)
    picked_tasks = [task for task, _ in picks]
    return {
        "num_steps": len(steps),
        "num_tasks_held_out": len(set(tasks)),
        "num_trajectories": len(trajectories),
        **measured("mse", mse, tasks, labels, scores),
        "mse_baseline": mse(labels, np.full(len(labels), baseline)),
        **measured("ece", ece, tasks, labels, scores),
        **measured("auroc_step", auroc, tasks, scores, (labels > RIGHT).astype(float)),
        **measured(
            "spearman_within_group", _mean, [task for task, _ in defined], np.array([rho for _, rho in defined])
        ),
        **measured("auroc_outcome", auroc, [steps[row].task_id for row in judged], means, right),
        **measured("best_of_4", _mean, picked_tasks, picked[:, 0]),
        **measured("best_of_4_random", _mean, picked_tasks, picked[:, 1]),
        **measured("best_of_4_oracle", _mean, picked_tasks, picked[:, 2]),
    }


def evaluate_prm(data: PrmData, trajectories: Iterable[Trajectory], *, score: Score, seed: int) -> dict[str, Any]:
    """Return the quality report on the held-out steps, and the highest score of each junk decision as `canaries`."""
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    held_out = [labelled.step for labelled in data.held_out]
    scores = score(held_out)
    outcomes = {name: outcome_of(by_id[name]) for name in {step.trajectory_id for step in held_out}}
    steps = [
        ScoredStep(
            task_id=labelled.step.task_id,
            group_id=by_id[labelled.step.trajectory_id].group_id,
            trajectory_id=labelled.step.trajectory_id,
            label=labelled.label,
            score=value,
            outcome=outcomes[labelled.step.trajectory_id],
        )
        for labelled, value in zip(data.held_out, scores, strict=True)
        if value is not None
    ]
    baseline = float(np.mean([labelled.label for labelled in data.train]))
    junk: dict[str, list[float]] = {}
    for context in [step for step in held_out if step.step == 0][:NUM_CANARY_CONTEXTS]:
        decisions = canaries(context)
        for name, value in zip(decisions, score(list(decisions.values())), strict=True):
            junk.setdefault(name, []).extend([] if value is None else [value])
    return {
        **quality_report(steps, baseline=baseline, seed=seed),
        "num_unscored": sum(value is None for value in scores),
        "canaries": {name: max(values, default=None) for name, values in junk.items()},
    }


def _mean(values: Array) -> float | None:
    return float(values.mean()) if len(values) else None
