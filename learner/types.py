"""What the learner eats and returns: samples, batches, step results, adapters."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rollout.canary import Canary


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpan:
    """The tokens `[start, end)` of a sample were sampled under this grammar (EBNF source)."""

    start: int
    end: int
    grammar: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One trajectory as one sequence; all arrays are `[T]` over `token_ids`.

    `loss_mask` is True at trained tokens; `policy_versions` says which version sampled each and is -1 elsewhere,
    `rollout_logprobs` and `advantages` are 0 elsewhere. `turn_ids` numbers the planner turns from 0, -1 outside.
    `temperature` is the sampler's. `num_masked_tokens` would be trained but for their age.
    """

    trajectory_id: str
    policy_versions: np.ndarray
    token_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    turn_ids: np.ndarray
    grammar_spans: tuple[GrammarSpan, ...]
    temperature: float
    num_masked_tokens: int = 0

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def oldest_policy_version(self) -> int | None:
        """None for a sample without a trained token."""
        return min(self.policy_versions[self.loss_mask].tolist(), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The samples of one optimizer step, already cut into microbatches (one forward pass each).

    `num_masked_tokens` were too old to train on. `oldest_policy_version` is None where no trained token is left.
    """

    microbatches: tuple[tuple[TrainingSample, ...], ...]
    num_loss_tokens: int
    num_trajectories: int
    num_masked_tokens: int
    oldest_policy_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one train step did. `policy_version` is the version of the weights it left behind; `skipped` says in a
    sentence why these are the weights of before, None where they are not."""

    policy_version: int
    metrics: Mapping[str, float]
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA weights as safetensors bytes, their sha256, the policy version they are, and what the learner says of the
    canary text with them, by which an engine that samples with them is known."""

    policy_version: int
    data: bytes
    digest: str
    canary: Canary | None = None
