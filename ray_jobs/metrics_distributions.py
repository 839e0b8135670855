"""How the numbers behind a train step are spread: histograms over the records of its trained trajectories."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout.types import versions_by_token

Record = Mapping[str, Any]

MAX_LOG_RATIO = 20.0
NUM_BUCKETS = 30

HISTOGRAMS: Mapping[str, str] = {
    "steps/advantage": "Advantage of each planner step",
    "steps/prm_score": "Score of the process reward model for each planner step",
    "steps/tokens": "Sampled tokens of each planner step",
    "steps/generate_s": "Seconds that each planner step waited for its completion",
    "steps/tool_s": "Seconds of each tool call",
    "trajectories/steps": "Planner steps of each trajectory",
    "tokens/staleness": "Age of each trained token in train steps: those since the weights that sampled it",
    "tokens/ratio": "Probability of each trained token under the learner over that under the engine that sampled it",
}
"""Every distribution with one line on what it counts."""

_WHOLE = {"steps/tokens", "trajectories/steps", "tokens/staleness"}
"""Those of whole numbers."""


class StepDistributions:
    """Looks at the records of one step, one by one. `version_ages` are those of their batch."""

    def __init__(self, version_ages: Mapping[int, int]) -> None:
        self._version_ages = version_ages
        self._values: dict[str, list[np.ndarray]] = {name: [] for name in HISTOGRAMS}

    def add(self, record: Record) -> None:
        """Counted if it was trained."""
        if record.get("verdict") == "trained":
            self._add(record)

    def histograms(self) -> dict[str, np.ndarray]:
        """By the names of `HISTOGRAMS`, those with anything in them: `[K, 3]`, left edge, right edge and count of
        each bucket. What is not a number is left out."""
        made = ((name, _buckets(parts, whole=name in _WHOLE)) for name, parts in self._values.items())
        return {name: buckets for name, buckets in made if buckets is not None}

    def _add(self, record: Record) -> None:
        turns = [turn for turn in record["turns"] if turn["role"] == "planner"]
        self._count("trajectories/steps", [len(turns)])
        self._count("steps/advantage", record["advantages"])
        self._count("steps/prm_score", record.get("prm_scores", ()))
        self._count("steps/tokens", [len(turn["logprobs"]) for turn in turns])
        self._count("steps/generate_s", [turn["generate_s"] for turn in turns])
        self._count("steps/tool_s", [turn["tool_s"] for turn in turns if turn["action"] is not None])
        for turn in turns:
            self._count("tokens/staleness", self._ages(turn))
            self._count("tokens/ratio", _ratios(turn))

    def _ages(self, turn: Record) -> np.ndarray:
        """Of each token, nan where it was too old to be trained."""
        num, ages = len(turn["logprobs"]), self._version_ages
        if not turn["switches"]:
            return np.full(num, ages.get(turn["policy_version"], math.nan))
        versions = versions_by_token(num, turn["policy_version"], turn["switches"])
        return np.array([ages.get(version, math.nan) for version in versions])

    def _count(self, name: str, values: Sequence[float | None] | np.ndarray) -> None:
        """None becomes nan."""
        self._values[name].append(np.asarray(values, dtype=np.float64))


def _ratios(turn: Record) -> np.ndarray:
    """Nan at tokens that were not trained: they have no log-prob of the learner's."""
    learner = np.asarray(turn.get("learner_logprobs", ()), dtype=np.float64)
    if not learner.size:
        return learner
    gaps = learner - np.asarray(turn["logprobs"], dtype=np.float64)[: len(learner)]
    return np.exp(np.clip(gaps, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _buckets(parts: Sequence[np.ndarray], *, whole: bool) -> np.ndarray | None:
    """None over nothing. Whole numbers get a bucket each, as long as they are few."""
    numbers = np.concatenate([np.zeros(0), *parts])
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return None
    low, high = numbers.min(), numbers.max()
    if whole and high - low < NUM_BUCKETS:
        edges = np.arange(low, high + 2) - 0.5
    else:
        edges = np.linspace(low, high, NUM_BUCKETS + 1) if high > low else np.array([low - 0.5, low + 0.5])
    counts, _ = np.histogram(numbers, edges)
    return np.stack([edges[:-1], edges[1:], counts], axis=1)
