"""The cluster of the actors: its address, its limits of time, and the shares of a GPU card."""

import os

from pydantic import Field, field_validator, model_validator

from configs.base import Config

WORK_FACTOR = 6
START_FACTOR = 12


class ClusterConfig(Config):
    address: str | None = None
    """Running Ray cluster to join, `auto` or `host:port`; `local` starts one on this machine. None joins the cluster
    that RAY_ADDRESS names, which every submitted job has, and otherwise starts one on this machine."""
    dashboard: bool = False
    """Start the Ray dashboard on loopback, if the run starts its own cluster."""
    patience_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds that the learner and the first rollout workers wait for room; on a cluster that starts machines on
    demand, the time that such a start takes."""
    answer_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds without an answer, or without a new token while requests are open, after which a rollout worker or the
    store is restarted. Calls of the learner and the PRM may take 6 times as long, and a start, or a first call, 12
    times. 20 times the measured median counts instead if it is longer."""

    @property
    def work_s(self) -> float:
        """Return the limit of a call of the learner (a train step, a checkpoint) and of the PRM, in seconds."""
        return WORK_FACTOR * self.answer_s

    @property
    def start_s(self) -> float:
        """Return the limit of a start and of the first call of each kind, in seconds: it may compile or download."""
        return START_FACTOR * self.answer_s

    @property
    def joined(self) -> str | None:
        """Return the address of the cluster that the run joins; None if it starts one."""
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        # For `ray job submit` that variable may name a dashboard, which nothing can join.
        return None if address == "local" or "://" in address else address

    @field_validator("address")
    @classmethod
    def _can_be_joined(cls, address: str | None) -> str | None:
        if address is not None and "://" in address:
            raise ValueError(
                "a run joins a cluster from one of its machines: give host:port as `ray start` printed it, or send the "
                f"run there with `agentflow submit --address {address}`"
            )
        return address


RANK_SHARE = 0.6
"""Share of a card for each of several ranks of a learner. NCCL refuses two ranks on one card; an engine still fits."""
BASE_SHARE = 0.01
"""Share of a card for the holder of shared base weights: Ray gives a process a card only with a share of it."""


class CardConfig(Config):
    shared: bool = False
    """Put the learner, the process reward model and the first rollout worker on one card: one reservation of a whole
    card that they divide by their shares. Otherwise each goes to any card that has its share free. It has no effect if
    the learner or the engine is on the CPU, or uses several cards."""
    share_base: bool = False
    """Let the learner and the first rollout worker read one copy of the frozen base weights, which a separate process
    holds on the card that they share; its share of the card, a hundredth, comes from the learner's. On CPUs it saves
    nothing, and in a cluster that was joined it has no effect."""
    learner: float = Field(default=0.4, gt=0, le=1)
    """The learner's share of a card, on `cuda`."""
    engine: float = Field(default=0.4, gt=0, le=1)
    """A rollout worker's share of a card, on `cuda`."""
    prm: float = Field(default=0.1, ge=0, le=1)
    """The process reward model's share of a card, on `cuda`; 0 if a recipe has none."""

    @model_validator(mode="after")
    def _one_card_is_enough(self) -> "CardConfig":
        total = self.learner + self.engine + self.prm
        if self.shared and total > 1 + 1e-9:
            raise ValueError(f"card.learner + engine + prm = {total:g} is more than the one card they share; at most 1")
        return self
