"""What the learner eats and returns: samples, batches, step results, adapters."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpan:
    """The tokens `[start, end)` of a sample were sampled under this grammar (EBNF)."""

    start: int
    end: int
    grammar: str


def sample_name(trajectory_id: str, branch: int) -> str:
    return f"{trajectory_id}#{branch}" if branch else trajectory_id


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One branch of a trajectory as one sequence; all arrays are `[T]` over `token_ids`.

    `loss_mask` is True at trained tokens. `ages` says by how many train steps the weights that sampled each are older
    than the learner's, -1 elsewhere; `rollout_logprobs` and `advantages` are 0 elsewhere. `turn_ids` numbers the
    planner turns, -1 outside. `temperature` is the sampler's. `num_masked_tokens` would be trained but for their age.
    `weight` is the sample's share of its trajectory.
    """

    trajectory_id: str
    ages: np.ndarray
    token_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    turn_ids: np.ndarray
    grammar_spans: tuple[GrammarSpan, ...]
    temperature: float
    num_masked_tokens: int = 0
    branch: int = 0
    weight: float = 1.0

    @property
    def name(self) -> str:
        return sample_name(self.trajectory_id, self.branch)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def max_age(self) -> int:
        return max(self.ages[self.loss_mask].tolist(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The samples of one optimizer step, cut into microbatches of one forward pass each.

    `num_trajectories` counts those with a trained token, `num_masked_tokens` tokens that are too old. `max_age` is the
    oldest trained token's.
    """

    microbatches: tuple[tuple[TrainingSample, ...], ...]
    num_loss_tokens: int
    num_trajectories: int
    num_masked_tokens: int
    max_age: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one train step did.

    `skipped` says in a sentence why the weights of `policy_version` are those of before, None where they are not.
    `learner_logprobs` are those of the trained tokens before the update, float32 by the sample's name.
    """

    policy_version: int
    metrics: Mapping[str, float]
    skipped: str | None = None
    learner_logprobs: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA weights as safetensors bytes, their sha256, and the policy version they are."""

    policy_version: int
    data: bytes
    digest: str
