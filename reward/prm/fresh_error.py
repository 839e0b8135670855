"""How wrong a process reward model is on what the policy does now."""

from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean

from reward.labels.labels import LabelError
from reward.labels.plan import plan_scores
from reward.types import ScoredGroup


def fresh_error(groups: Iterable[ScoredGroup]) -> Mapping[str, float]:
    """`prm/rejudge_mse`, the mean squared error of the scores against the plan's, over the steps of a batch that have
    both; nothing where none has."""
    errors = [error for scored in groups for error in _errors(scored)]
    return {"prm/rejudge_mse": fmean(error**2 for error in errors)} if errors else {}


def _errors(scored: ScoredGroup) -> Iterator[float]:
    """The PRM's scores less the plan's; none for a task without a plan, for only generated ones have it, and a mix may
    hold others."""
    if scored.step_scores is None:
        return
    try:
        truths = [plan_scores(trajectory) for trajectory in scored.group.trajectories]
    except LabelError:
        return
    for scores, known in zip(scored.step_scores.raw, truths, strict=True):
        for score, truth in zip(scores, known, strict=True):
            if score is not None:
                yield score - truth
