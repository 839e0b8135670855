"""Who shares a GPU card with whom. Shares are what Ray counts; `agentflow plan` says whether the memory is there."""

from pydantic import Field, model_validator

from configs.base import Config

RANK_SHARE = 0.6
"""Of a card, for each of several ranks of a learner: NCCL refuses two of them on one, and an engine still fits beside
it."""


class CardConfig(Config):
    shared: bool = False
    """Learner, process reward model and first rollout worker stand on one card: one reservation of a whole card that
    they divide by their shares. Without it each goes to a card that has its share free, and with several cards that
    may be another one. Without effect where learner or engine is on the CPU, or over several cards."""
    learner: float = Field(default=0.4, gt=0, le=1)
    """The learner's share of a card, on `cuda`."""
    engine: float = Field(default=0.4, gt=0, le=1)
    """A rollout worker's share of a card, on `cuda`."""
    prm: float = Field(default=0.1, ge=0, le=1)
    """The process reward model's share of a card, on `cuda`; 0 where a recipe has none."""

    @model_validator(mode="after")
    def _one_card_is_enough(self) -> "CardConfig":
        total = self.learner + self.engine + self.prm
        if self.shared and total > 1 + 1e-9:
            raise ValueError(f"card.learner + engine + prm = {total:g} is more than the one card they share; at most 1")
        return self
