"""The world the agent acts in: task mix, tools, code sandbox."""

from typing import Literal

from pydantic import Field, field_validator

from configs.base import Config


class SandboxConfig(Config):
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    """Wall-clock limit of one code call."""
    memory_mb: int = Field(default=1024, ge=128)
    """Address-space limit of one code process."""


class EnvsConfig(Config):
    mix: dict[str, float] = {"lookup": 0.6, "two_lookup": 0.4}
    """Data set name -> share of the tasks."""
    data_path: str | None = None
    """Local file for data sets that are not generated (AIME, Game of 24)."""
    actions: tuple[Literal["think", "search", "code", "answer"], ...] = ("think", "search", "code", "answer")
    """Actions in the planner's grammar; `answer` is always needed."""
    search: Literal["offline", "tavily"] = "offline"
    """`offline` searches the generated catalogue; `tavily` needs TAVILY_API_KEY."""
    search_latency_s: float = Field(default=0.0, ge=0, le=60)
    """Simulates a remote search service: an offline search takes so long in the median, with a heavy tail. For
    measurements; the same query takes equally long in every run."""
    search_results: int = Field(default=1, ge=1, le=10)
    """Passages per search."""
    max_result_chars: int = Field(default=400, ge=20)
    """Longer tool results are cut in the middle before the planner reads them."""
    sandbox: SandboxConfig = SandboxConfig()

    @field_validator("mix")
    @classmethod
    def _positive_mix(cls, mix: dict[str, float]) -> dict[str, float]:
        if not mix or min(mix.values()) < 0 or sum(mix.values()) <= 0:
            raise ValueError(f"shares must be >= 0 with a positive sum, got {mix}")
        return mix

    @field_validator("actions")
    @classmethod
    def _can_answer(cls, actions: tuple[str, ...]) -> tuple[str, ...]:
        if "answer" not in actions:
            raise ValueError("actions must contain 'answer', or no task could ever end")
        return actions
