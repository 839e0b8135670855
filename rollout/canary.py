"""The canary: the log-probs of one fixed text tell with which weights an engine really samples.

Digests prove which bytes arrived; only the model's own output proves that they are in use. The field's most damaging
silent fault is an engine that goes on with the base model or an earlier adapter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

TEXT = (
    "Question: The red lighthouse keeps 48 lamps in 6 equal rows. How many lamps stand in one row? "
    '{"thought": "I divide the lamps by the rows.", "action": "code", "action_input": "48 / 6"} '
    "The result is 8. Search for the keeper of the lighthouse, then answer with the number of lamps."
)

MAX_MEAN_GAP = 0.25
"""Mean absolute difference in nats between learner and engine on the text. bfloat16 alone makes 0.04 to 0.09 with the
135M demo model, whose cold start moves the text by 1.0."""

LEAST_MOVE = 0.25
"""Euclidean distance between two versions' log-probs of the text, as the learner computes them, above which an engine
that took up the second must have moved as well."""

LEAST_SHARE = 0.1
"""The least share of that distance that the engine must have moved. Unchanged weights move it by nothing: what
separates learner and engine is rounding, which is the same each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Log-probs of `token_ids`, one for each token but the first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScores:
    """What learner and engine say of the canary text with what should be the same weights."""

    learner: Sequence[float]
    engine: Sequence[float]


def canary_fault(now: CanaryScores, before: CanaryScores | None = None) -> str | None:
    """What is wrong with the weights that an engine samples with; None where nothing is.

    `now` is for the version that was loaded last, `before` for the one that this engine had until then.
    """
    gap = mean_gap(now.engine, now.learner)
    if not gap <= MAX_MEAN_GAP:
        return f"the engine's log-probs of the canary are {gap:.3f} nats from the learner's (bound {MAX_MEAN_GAP})"
    if before is None:
        return None
    learner, engine = math.dist(now.learner, before.learner), math.dist(now.engine, before.engine)
    if learner >= LEAST_MOVE and engine < LEAST_SHARE * learner:
        return (
            f"the engine still samples with the version before: it moved by {engine:.3f}, the learner by {learner:.3f}"
        )
    return None


def mean_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean absolute difference of two rows of log-probs, in nats."""
    return sum(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True)) / len(one)
