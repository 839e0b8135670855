"""Quality of a PRM on steps that it was not trained on: agreement with labels and outcomes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from configs.errors import UserError
from reward.prm.step_text import StepText
from reward.prm.training import PrmData
from rollout.filters import SOLVED
from rollout.types import Trajectory

Array = npt.NDArray[np.float64]
Statistic = Callable[..., float | None]
Score = Callable[[Sequence[StepText]], Sequence[float | None]]

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


def clustered_interval(
    statistic: Statistic,
    clusters: Sequence[str],
    columns: Sequence[Array],
    *,
    seed: int,
    num_draws: int = 500,
) -> tuple[float, float] | None:
    """Return the 95% percentile interval of a statistic under a bootstrap of clusters (Efron, Tibshirani 1993, ch. 13).

    None for fewer than two clusters, or if the statistic is undefined in more than half of the draws.
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


def quality_report(trajectories: Sequence[Trajectory], labels: Array, scores: Array, *, seed: int) -> dict[str, Any]:
    """Return what the scores of held-out steps say about the PRM; each figure x has its 95% interval as `x_ci95`.

    mse, mse_baseline: squared error against the labels, and that of the best constant, their variance.
    auroc_step: right steps against wrong ones.
    spearman_within_group: rank correlation with the labels within each group, averaged.
    auroc_outcome: right against wrong trajectories by the mean score of their steps.

    `trajectories`, `labels` and `scores` have one entry per step. Raises UserError without steps.
    """
    if not trajectories:
        raise UserError("no held-out step could be scored; raise prm.max_tokens, or collect more tasks")
    tasks = [trajectory.task.id for trajectory in trajectories]

    def measured(name: str, statistic: Statistic, clusters: Sequence[str], *columns: Array) -> dict[str, Any]:
        value = statistic(*columns) if clusters else None
        interval = clustered_interval(statistic, clusters, columns, seed=seed) if value is not None else None
        return {name: value, f"{name}_ci95": interval}

    groups, attempts = _places(one.group_id for one in trajectories), _places(one.id for one in trajectories)
    correlations = [(tasks[rows[0]], spearman(labels[rows], scores[rows])) for rows in groups]
    defined = [(task, value) for task, value in correlations if value is not None]
    judged = [rows for rows in attempts if trajectories[rows[0]].outcome is not None]
    right = np.array([float(trajectories[rows[0]].outcome == SOLVED) for rows in judged])
    means = np.array([scores[rows].mean() for rows in judged])
    rhos = np.array([rho for _, rho in defined])
    return {
        "num_steps": len(tasks),
        "num_tasks_held_out": len(set(tasks)),
        "num_trajectories": len(attempts),
        **measured("mse", mse, tasks, labels, scores),
        "mse_baseline": float(np.var(labels)),
        **measured("auroc_step", auroc, tasks, scores, (labels > RIGHT).astype(float)),
        **measured("spearman_within_group", lambda column: float(column.mean()), [task for task, _ in defined], rhos),
        **measured("auroc_outcome", auroc, [tasks[rows[0]] for rows in judged], means, right),
    }


def _places(names: Iterable[str]) -> list[list[int]]:
    """Return the positions of each name."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, name in enumerate(names):
        places[name].append(place)
    return list(places.values())


def evaluate_prm(data: PrmData, trajectories: Iterable[Trajectory], *, score: Score, seed: int) -> dict[str, Any]:
    """Return the quality report on the held-out steps that have a score, and the number of the others."""
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    found = list(zip(data.held_out, score([labelled.step for labelled in data.held_out]), strict=True))
    scored = [(labelled, value) for labelled, value in found if value is not None]
    report = quality_report(
        [by_id[labelled.step.trajectory_id] for labelled, _ in scored],
        np.array([labelled.label for labelled, _ in scored]),
        np.array([value for _, value in scored]),
        seed=seed,
    )
    return {**report, "num_unscored": len(found) - len(scored)}
