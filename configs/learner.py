"""The update: objective, optimizer, microbatches, the supervised cold start."""

from typing import Literal

from pydantic import Field

from configs.base import Config


class LearnerConfig(Config):
    objective: Literal["dapo", "grpo", "flow_grpo"] = "dapo"
    """`dapo`: token mean over the whole step, clip-higher. `grpo`: mean per trajectory first. `flow_grpo`: mean per
    turn, then per trajectory, with a KL term to the untouched model."""
    kl_weight: float = Field(default=0.001, ge=0)
    """Weight of the KL term of `flow_grpo`."""
    learning_rate: float = Field(default=3e-4, gt=0)
    """AdamW's step size."""
    warmup_steps: int = Field(default=0, ge=0)
    """Train steps of linear warm-up."""
    schedule: Literal["constant", "linear"] = "constant"
    """After the warm-up: `constant`, or falling in a straight line to zero after the last train step."""
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm beyond which the gradient is scaled down."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    max_importance_weight: float = Field(default=2.0, ge=1)
    """C of the truncated importance weights that correct for staleness (on whenever pipeline_depth > 0)."""
    overlong: Literal["none", "soft", "filter"] = "none"
    """`soft`: DAPO's length penalty. `filter`: cut trajectories leave the loss and the statistics."""
    overlong_cache_tokens: int = Field(default=16, ge=0)
    """Length before the limit over which the soft penalty grows from 0 to -1."""
    microbatch_tokens: int = Field(default=1024, ge=64)
    """Most distinct tokens of one forward pass; shared prefixes count once."""
    num_threads: int = Field(default=2, ge=1)
    """CPU threads of the learner."""
    device: Literal["cpu", "cuda"] = "cpu"
    checkpoint_every: int = Field(default=5, ge=1)
    """Train steps between checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older checkpoints are deleted."""


class ColdStartConfig(Config):
    num_demonstrations: int = Field(default=240, ge=0)
    """Scripted demonstrations; 0 skips the phase."""
    wrong_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the demonstrations that are wrong on purpose, so that RL has something to improve."""
    batch_demonstrations: int = Field(default=8, ge=1)
    """Demonstrations per optimizer step; every one is used once."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """AdamW's first step size; it falls linearly to zero."""
