"""How good a PRM is on steps it never saw: ranking, calibration, first errors, each with its interval."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeAlias

import numpy as np

from reward.collected import outcome_of
from reward.prm.decoys import canaries
from reward.prm.metrics import (
    Array,
    auroc,
    best_of_n,
    bias,
    clustered_interval,
    concordance,
    ece,
    mae,
    mse,
    r2_over,
    reliability,
    spearman,
)
from reward.prm.step_text import StepText
from reward.prm.training import LabelledStep, PrmData
from reward.types import PrmDataError
from rollout.filters import SOLVED
from rollout.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """A planner decision with its label and the PRM's raw output. `group_id` is shared by the attempts at one
    task that were sampled together; `outcome` is the trajectory's, None where it was never judged."""

    task_id: str
    group_id: str
    trajectory_id: str
    step: int
    label: float
    score: float
    num_chars: int
    action: str
    outcome: float | None
    valid: bool


class ScoredTable:
    """Held-out steps in the order of task, group, trajectory and step, and where each of these begins and ends."""

    def __init__(self, steps: Sequence[ScoredStep]) -> None:
        self.steps = sorted(steps, key=lambda step: (*_trajectory(step), step.step))
        self.tasks = [step.task_id for step in self.steps]
        self.labels = np.array([step.label for step in self.steps])
        self.groups = _runs(map(_group, self.steps))
        self.trajectories = _runs(map(_trajectory, self.steps))
        self.judged = [run for run in self.trajectories if self.steps[run.start].outcome is not None]
        self.right = np.array([float(self.steps[run.start].outcome == SOLVED) for run in self.judged])
        self.siblings = _runs(_group(self.steps[run.start]) for run in self.judged)

    def sizes(self) -> dict[str, int]:
        return {
            "num_tasks_held_out": len(set(self.tasks)),
            "num_steps": len(self.steps),
            "num_invalid_steps": sum(not step.valid for step in self.steps),
            "num_groups": len(self.groups),
            "num_trajectories": len(self.trajectories),
            "num_trajectories_judged": len(self.judged),
        }

    def tasks_of(self, runs: Iterable[slice]) -> list[str]:
        return [self.tasks[run.start] for run in runs]

    def aggregate(self, pred: Array, how: Callable[[Array], float]) -> Array:
        """One number for each judged trajectory. Rounded, for the mean of equal scores depends on how many."""
        return np.array([round(float(how(pred[run])), 12) for run in self.judged])


def _group(step: ScoredStep) -> tuple[str, str]:
    return step.task_id, step.group_id


def _trajectory(step: ScoredStep) -> tuple[str, str, str]:
    return step.task_id, step.group_id, step.trajectory_id


def _runs(keys: Iterable[Hashable]) -> list[slice]:
    """Where equal neighbours begin and end."""
    edges = accumulate((sum(1 for _ in members) for _, members in groupby(keys)), initial=0)
    return [slice(start, stop) for start, stop in pairwise(edges)]


NUM_CANARY_CONTEXTS = 8

Report: TypeAlias = dict[str, object]
"""Numbers by name, for JSON."""

Score = Callable[[Sequence[StepText]], Sequence[float | None]]


def evaluate_prm(data: PrmData, trajectories: Iterable[Trajectory], *, score: Score, seed: int) -> dict[str, Any]:
    """The quality report on the held-out steps, `canaries` (the highest score of each junk decision over some
    held-out contexts) and `invariances` (the largest change of a score that should not change)."""
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    held_out = [one.step for one in data.held_out]
    scores = score(held_out)
    outcomes = {name: outcome_of(by_id[name]) for name in dict.fromkeys(step.trajectory_id for step in held_out)}
    train = _scored_steps(data.train, [one.label for one in data.train], by_id, {})
    contexts = [step for step in held_out if step.step == 0][:NUM_CANARY_CONTEXTS]
    return {
        **quality_report(train, _scored_steps(data.held_out, scores, by_id, outcomes), seed=seed),
        "canaries": _canary_scores(contexts, score),
        "num_unscored": sum(value is None for value in scores),
        "invariances": _invariances(held_out[:NUM_CANARY_CONTEXTS], scores, score),
    }


def _scored_steps(
    steps: Sequence[LabelledStep],
    scores: Sequence[float | None],
    trajectories: Mapping[str, Trajectory],
    outcomes: Mapping[str, float | None],
) -> list[ScoredStep]:
    return [
        _scored_step(one, score, trajectories[one.step.trajectory_id], outcomes.get(one.step.trajectory_id))
        for one, score in zip(steps, scores, strict=True)
        if score is not None
    ]


def _scored_step(one: LabelledStep, score: float, trajectory: Trajectory, outcome: float | None) -> ScoredStep:
    call = trajectory.planner_turns[one.step.step].tool_call
    return ScoredStep(
        task_id=one.step.task_id,
        group_id=trajectory.group_id,
        trajectory_id=trajectory.id,
        step=one.step.step,
        label=one.label,
        score=score,
        num_chars=len(one.step.decision),
        action=call.name if call else "reply" if one.step.valid else "malformed",
        outcome=outcome,
        valid=one.step.valid,
    )


def _canary_scores(contexts: Sequence[StepText], score: Score) -> dict[str, float | None]:
    """None for a junk decision that got no score in any context."""
    found: dict[str, list[float]] = {}
    for context in contexts:
        junk = canaries(context)
        for name, value in zip(junk, score(list(junk.values())), strict=True):
            found.setdefault(name, []).extend([] if value is None else [value])
    return {name: max(values, default=None) for name, values in found.items()}


def _invariances(steps: Sequence[StepText], together: Sequence[float | None], score: Score) -> dict[str, float | None]:
    """`batch`: scored with others or alone. `own_result`: with another result of the step's own tool call."""
    changed = [replace(step, result="Result: something else\n") for step in steps]
    return {
        "batch": _largest_change(together, [score([step])[0] for step in steps]),
        "own_result": _largest_change(score(list(steps)), score(changed)),
    }


def _largest_change(left: Sequence[float | None], right: Sequence[float | None]) -> float | None:
    """None where nothing could be compared."""
    pairs = [(a, b) for a, b in zip(left, right, strict=False) if a is not None and b is not None]
    return max((abs(a - b) for a, b in pairs), default=None)


Measure = Callable[..., Report]
Range = tuple[float, float]
_BINS = 10
_PICKS = (2, 4)
_UNIT: Range = (0.0, 1.0)
_SIGNED: Range = (-1.0, 1.0)
_AT_MOST_ONE: Range = (-math.inf, 1.0)
RIGHT = 0.5
"""A step with a higher label is a right one, where right steps are told from wrong ones."""


def quality_report(
    train_steps: Sequence[ScoredStep], held_out: Sequence[ScoredStep], *, seed: int, num_bootstrap: int = 500
) -> Report:
    """Judge the scores of `held_out`; `train_steps` only fit the baselines.

    A number `x` has its 95% interval, clustered by task, beside it as `x_ci95`, and what a baseline reaches as
    `x_baseline_constant` (the mean label of the training steps) and `x_baseline_length` (least squares on length
    and action). None where undefined. Within a group, steps of all its trajectories are compared; `auroc_outcome`
    and `best_of_n` rank trajectories by the mean of their scores. `auroc_by_action` compares like with like: right
    steps of an action against wrong ones, where `auroc_outcome` may only tell who used tools from who guessed.
    Malformed steps are steps like others.
    Raises PrmDataError for an empty side.
    """
    if not train_steps or not held_out:
        raise PrmDataError(
            f"a PRM is measured with steps on both sides, got {len(train_steps)} to train on and {len(held_out)} held "
            "out that it could score; where these are longer than it reads raise prm.max_tokens, else collect more "
            "tasks"
        )
    table = ScoredTable(held_out)
    measure = partial(_measured, seed=seed, num_draws=num_bootstrap)
    score = np.array([step.score for step in table.steps])
    constant, length = _baselines(train_steps, table.steps)
    return {
        **table.sizes(),
        **_agreement_with_labels(table, score, "", measure),
        **_agreement_with_labels(table, constant, "_baseline_constant", measure),
        **_agreement_with_labels(table, length, "_baseline_length", measure),
        **measure("r2_over_constant", r2_over, table.tasks, table.labels, score, constant, within=_AT_MOST_ONE),
        **measure("r2_over_length", r2_over, table.tasks, table.labels, score, length, within=_AT_MOST_ONE),
        "auroc_by_action": _by_action(table, score, measure),
        **_calibration(table, score, measure),
        **_habits(table, score, measure),
        "best_of_n": {str(n): _gain(table, score, n, measure) for n in _PICKS},
    }


def _agreement_with_labels(table: ScoredTable, pred: Array, suffix: str, measure: Measure) -> Report:
    by_group = [(spearman(table.labels[run], pred[run]), run) for run in table.groups]
    defined = [(value, run) for value, run in by_group if value is not None]
    pairs = np.array([concordance(table.labels[run], pred[run]) for run in table.groups], dtype=float)
    correlations, runs = np.array([value for value, _ in defined]), [run for _, run in defined]
    ranked = table.aggregate(pred, np.mean)
    return {
        **measure(f"mse{suffix}", mse, table.tasks, table.labels, pred),
        **measure(f"spearman_overall{suffix}", spearman, table.tasks, table.labels, pred, within=_SIGNED),
        **measure(f"spearman_within_group{suffix}", np.mean, table.tasks_of(runs), correlations, within=_SIGNED),
        f"num_groups_defined{suffix}": len(defined),
        **measure(
            f"pairwise_accuracy_within_group{suffix}",
            _ratio,
            table.tasks_of(table.groups),
            *(pairs[:, 0], pairs.sum(axis=1)),
        ),
        **measure(f"auroc_outcome{suffix}", auroc, table.tasks_of(table.judged), ranked, table.right),
    }


def _calibration(table: ScoredTable, score: Array, measure: Measure) -> Report:
    return {
        **measure("mae", mae, table.tasks, table.labels, score),
        **measure("bias", bias, table.tasks, table.labels, score, within=_SIGNED),
        **measure("ece", partial(ece, bins=_BINS), table.tasks, table.labels, score),
        "reliability": [asdict(row) for row in reliability(table.labels, score, bins=_BINS)],
    }


def _habits(table: ScoredTable, score: Array, measure: Measure) -> Report:
    """Other ways to sum up a trajectory, and two habits to watch: following length, and judging the end only."""
    length = np.array([float(step.num_chars) for step in table.steps])
    judged, long = table.tasks_of(table.judged), [run for run in table.trajectories if run.stop - run.start > 1]
    on_last = np.array([_lowest_is_last(score[run]) for run in long])
    return {
        "auroc_outcome_aggregate": "mean",
        **measure("auroc_outcome_min", auroc, judged, table.aggregate(score, np.min), table.right),
        **measure("auroc_outcome_last", auroc, judged, table.aggregate(score, lambda one: one[-1]), table.right),
        **measure("spearman_score_length", spearman, table.tasks, score, length, within=_SIGNED),
        **measure("share_min_on_last", np.mean, table.tasks_of(long), on_last),
    }


def _gain(table: ScoredTable, score: Array, n: int, measure: Measure) -> Report:
    ranked = table.aggregate(score, np.mean)
    enough = [run for run in table.siblings if run.stop - run.start >= n]
    picks = [best_of_n(ranked[run], table.right[run], n) for run in enough]
    prm, random, oracle = (np.array([getattr(pick, name) for pick in picks]) for name in ("prm", "random", "oracle"))
    tasks = table.tasks_of(table.judged[run.start] for run in enough)
    return {
        "num_groups": len(picks),
        **measure("prm", np.mean, tasks, prm),
        **measure("random", np.mean, tasks, random),
        **measure("oracle", np.mean, tasks, oracle),
        **measure("gain", np.mean, tasks, prm - random, within=_SIGNED),
        **measure("share_of_headroom", _ratio, tasks, prm - random, oracle - random, within=_AT_MOST_ONE),
    }


def _by_action(table: ScoredTable, score: Array, measure: Measure) -> Report:
    """Of the actions that both right and wrong steps have."""
    found: Report = {}
    for action in sorted({step.action for step in table.steps}):
        rows = [place for place, step in enumerate(table.steps) if step.action == action]
        right = table.labels[rows] > RIGHT
        if 0 < right.sum() < len(rows):
            found[action] = {
                "num_right": int(right.sum()),
                "num_wrong": int((~right).sum()),
                **measure("auroc", auroc, [table.tasks[row] for row in rows], score[rows], right.astype(float)),
            }
    return found


def _measured(
    name: str,
    statistic: Callable[..., float | None],
    tasks: Sequence[str],
    *columns: Array,
    seed: int,
    num_draws: int,
    within: Range = _UNIT,
) -> Report:
    value = statistic(*columns) if tasks else None
    if value is None:
        return {name: None, f"{name}_ci95": None}
    interval = clustered_interval(statistic, tasks, columns, seed=seed, num_draws=num_draws, within=within)
    return {name: float(value), f"{name}_ci95": list(interval) if interval else None}


def _baselines(train: Sequence[ScoredStep], steps: Sequence[ScoredStep]) -> tuple[Array, Array]:
    """What the mean label says of `steps`, and what length and action do. An action that was never trained on
    counts as an average one."""
    labels = np.array([step.label for step in train])
    actions = sorted({step.action for step in train})
    average = float(np.mean([step.num_chars for step in train]))

    def features(of: Sequence[ScoredStep]) -> Array:
        return np.array([[step.num_chars - average, *(step.action == action for action in actions)] for step in of])

    weights = np.linalg.lstsq(features(train), labels - labels.mean(), rcond=None)[0]
    # Rounded, so that equal steps stay tied whatever the order in which they were summed.
    return np.full(len(steps), labels.mean()), (labels.mean() + features(steps) @ weights).round(12)


def _ratio(parts: Array, wholes: Array) -> float | None:
    # A headroom of nothing is not exactly 0 once it was rounded.
    return float(parts.sum() / wholes.sum()) if wholes.sum() > 1e-9 else None


def _lowest_is_last(scores: Array) -> float:
    """1 where it is, shared with the steps that are as low."""
    lowest = scores == scores.min()
    return float(lowest[-1] / lowest.sum())
