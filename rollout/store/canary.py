"""The canary: the log-probs of one fixed text tell with which weights an engine really samples.

Digests prove which bytes arrived and what the engine's memory holds (`rollout.engines.read_back`); only the model's
own output proves that requests are computed with it. The field's most damaging silent fault is an engine that goes on
with the base model or an earlier adapter.

Rounding limits what one text can tell. In bfloat16 the slightest change of the weights moves every log-prob at random,
in the learner as in the engine, so two versions are told apart only where training moved the text by more than that.
Until then the engine is not proven by its output, and the movement adds up over versions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

TEXT = (
    "Question: The red lighthouse keeps 48 lamps in 6 equal rows. How many lamps stand in one row? "
    '{"thought": "I divide the lamps by the rows.", "action": "code", "action_input": "48 / 6"} '
    "The result is 8. Search for the keeper of the lighthouse, then answer with the number of lamps."
)

MAX_MEAN_GAP = 0.25
"""Mean absolute difference in nats between learner and engine on the text. bfloat16 alone makes 0.05 to 0.10 with the
135M demo model, whose cold start moves the text by 1.0."""

LEAST_MOVE = 0.25
"""Euclidean distance between two readings of the text below which they are taken to be the same."""

LEAST_SHARE = 0.1
"""The least share of the learner's movement that an engine that took up the new weights has moved by."""

MAX_UNMOVED = 8
"""Published versions over which the learner's log-probs may move and the engine's not. A few are no fault: the first
tiny steps away from the base model may be below the engine's rounding and above the learner's."""

CLEARLY_NEARER = 2.5
"""A reading is another version's where it is nearer to it than to its own, and the two versions are apart by so many
times its distance to that other one. Rounding alone brought a healthy engine to 1.5, an engine at version 0 or 1 in
place of version 10 of the demo run to 3.3 and more."""

CLEAR_MOVE = 4.0
"""How many times the distance of learner and engine with the earlier weights the learner must have moved, before the
direction in which the engine moved is judged."""

LEAST_PROJECTION = 0.5
"""The least share of such a movement that the engine must have made in the same direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The learner's log-probs of `token_ids`, one for each token but the first: with the weights of a version, and with
    the untouched base model, where they are known."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    base_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """An engine's log-probs of the canary text with what it calls this version."""

    policy_version: int
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScores:
    """What learner and engine say of the canary text with what should be the weights of the same version."""

    policy_version: int
    learner: Sequence[float]
    engine: Sequence[float]


def canary_fault(
    now: CanaryScores, before: Iterable[CanaryScores] = (), published: Mapping[int, Sequence[float]] | None = None
) -> str | None:
    """What is wrong with the weights that an engine samples with; None where nothing is known to be.

    `now` is of the version that was loaded last. `before` are earlier scores of the same engine: with the base model,
    and the last ones by which it was `moved`. `published` are the learner's log-probs of the text by version, those of
    other versions than `now` among them. Raises ValueError for log-probs of texts of different lengths.
    """
    gap = mean_gap(now.engine, now.learner)
    if not gap <= MAX_MEAN_GAP:
        return f"the engine's log-probs of the canary are {gap:.3f} nats from the learner's (bound {MAX_MEAN_GAP})"
    for one in before:
        if fault := _still_before(now, one) or _elsewhere(now, one):
            return fault
    return _other_version(now, published or {})


def moved(now: CanaryScores, before: CanaryScores) -> bool:
    """Whether it is proven that the engine no longer computes as it did before. `now` has no fault."""
    return _unmoved_by(now, before) is None and math.dist(now.learner, before.learner) >= LEAST_MOVE


def mean_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean absolute difference of two rows of log-probs, in nats."""
    return sum(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True)) / len(one)


def _unmoved_by(now: CanaryScores, before: CanaryScores) -> tuple[float, float] | None:
    """How far engine and learner moved, where the learner did and the engine did not."""
    learner, engine = math.dist(now.learner, before.learner), math.dist(now.engine, before.engine)
    return (engine, learner) if learner >= LEAST_MOVE and engine < LEAST_SHARE * learner else None


def _still_before(now: CanaryScores, before: CanaryScores) -> str | None:
    distances = _unmoved_by(now, before)
    if distances is None or now.policy_version - before.policy_version < MAX_UNMOVED:
        return None
    engine, learner = distances
    return (
        f"the engine still samples as with {_named(before.policy_version)}: it moved by {engine:.3f}, the learner by "
        f"{learner:.3f}"
    )


def _elsewhere(now: CanaryScores, before: CanaryScores) -> str | None:
    learner = [new - old for new, old in zip(now.learner, before.learner, strict=True)]
    engine = [new - old for new, old in zip(now.engine, before.engine, strict=True)]
    length = math.hypot(*learner)
    if length < max(LEAST_MOVE, CLEAR_MOVE * math.dist(before.engine, before.learner)):
        return None
    share = sum(mine * theirs for mine, theirs in zip(engine, learner, strict=True)) / length**2
    if share >= LEAST_PROJECTION:
        return None
    return (
        f"the engine moved by {share:.2f} of the learner's way from {_named(before.policy_version)} (bound "
        f"{LEAST_PROJECTION}): it samples with other weights"
    )


def _other_version(now: CanaryScores, published: Mapping[int, Sequence[float]]) -> str | None:
    own = math.dist(now.engine, now.learner)
    if 2 * own < LEAST_MOVE:
        # What is nearer than that is no farther away from the learner's than twice as much.
        return None
    for version, learner in published.items():
        distance = math.dist(now.engine, learner)
        if distance < own and math.dist(now.learner, learner) >= max(LEAST_MOVE, CLEARLY_NEARER * distance):
            return (
                f"the engine samples with {_named(version)}: its log-probs of the canary are {distance:.3f} from the "
                f"learner's with that, {own:.3f} from those with version {now.policy_version}"
            )
    return None


def _named(policy_version: int) -> str:
    return "the base model" if policy_version < 0 else f"version {policy_version}"
