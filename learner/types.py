"""What the learner eats and returns: samples, batches, step results, adapters."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpan:
    """The tokens `[start, end)` of a sample were sampled under this grammar (EBNF source)."""

    start: int
    end: int
    grammar: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One trajectory as one sequence; all arrays are `[T]` over `token_ids`.

    `loss_mask` is True at trained tokens; `rollout_logprobs` and `advantages` are 0 elsewhere. `turn_ids`
    numbers the planner turns from 0, -1 outside. `temperature` is the sampler's.
    """

    trajectory_id: str
    policy_version: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    turn_ids: np.ndarray
    grammar_spans: tuple[GrammarSpan, ...]
    temperature: float

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The samples of one optimizer step, already cut into microbatches (one forward pass each)."""

    microbatches: tuple[tuple[TrainingSample, ...], ...]
    num_loss_tokens: int
    num_trajectories: int
    oldest_policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one train step did. `policy_version` is the version of the weights it left behind."""

    policy_version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA weights as safetensors bytes, their sha256, and the policy version they are."""

    policy_version: int
    data: bytes
    digest: str
