"""Evaluation: which held-out tasks, how they are sampled, and who is asked when a short answer matches no reference."""

from pydantic import Field, field_validator

from configs.base import Config
from configs.judge import JudgeConfig


class EvaluationConfig(Config):
    num_tasks: int = Field(default=300, ge=1)
    """Held-out tasks on which the cold-started and the trained policy are compared, paired."""
    num_untouched_tasks: int = Field(default=100, ge=0)
    """The first so many of the same tasks are also given to the untouched model."""
    mix: dict[str, float] | None = None
    """Data set name -> share of the held-out tasks; none takes envs.mix. What is only here is never trained on."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of `agentflow evaluate`; 0 is greedy, and several seeds need more. The phases of a
    training run are greedy."""
    max_attempts: int = Field(default=3, ge=1, le=20)
    """Tries at one item whose engine or tools failed, before it counts as not solved."""
    judge: JudgeConfig | None = None
    """A language model that is asked where a short answer equals no reference; counted and reported apart."""

    @field_validator("mix")
    @classmethod
    def _positive_mix(cls, mix: dict[str, float] | None) -> dict[str, float] | None:
        if mix is not None and (not mix or min(mix.values()) < 0 or sum(mix.values()) <= 0):
            raise ValueError(f"shares must be >= 0 with a positive sum, got {mix}")
        return mix
