"""Settings of the cluster: where the actors run, how they share a card, and when a part counts as hung."""

import os

from pydantic import Field, field_validator, model_validator

from configs.base import Config


class ClusterConfig(Config):
    address: str | None = None
    """A running Ray cluster to join, `auto` or `host:port`; `local` starts one on this machine. None joins the cluster
    that RAY_ADDRESS names, as it does inside of every submitted job, and else starts one on this machine."""
    dashboard: bool = False
    """Start the Ray dashboard on loopback, if the run starts its own cluster."""
    patience_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds that learner and first rollout workers wait for room. On a cluster that adds nodes on demand, set this to
    the time in which a node starts."""

    @property
    def joined(self) -> str | None:
        """Address of the cluster that the run joins; None where it starts its own."""
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
"""Share of a card for each of several ranks of a learner: NCCL rejects two of them on one card, and an engine still
fits."""


BASE_SHARE = 0.01
"""Share of a card for the holder of shared base weights: Ray gives a process a card only with a share of it."""


class CardConfig(Config):
    shared: bool = False
    """Place learner, process reward model and first rollout worker on one card, which is reserved as a whole. Otherwise
    each is placed on a card that has its share free. No effect if learner or engine is on the CPU, or over several
    cards."""
    share_base: bool = False
    """Let learner and first rollout worker read one copy of the frozen base weights, which a separate process holds on
    their card; its share, a hundredth, comes from the learner's. On CPUs this is a rehearsal that saves nothing, and it
    has no effect on a cluster that was joined."""
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


class LivenessConfig(Config):
    answer_s: float = Field(default=300.0, gt=0)
    """Seconds after which a part counts as hung that does not answer, or whose engine makes no progress on open
    requests; 20 times the median of its answers if that is more. Holds for rollout workers and dynamic sampling."""
    work_s: float = Field(default=1800.0, gt=0)
    """The same limit for a call of the learner (a train step, a checkpoint) and for the PRM."""
    start_s: float = Field(default=3600.0, gt=0)
    """The same limit for a process that starts, and for the first call of each kind: it may load or compile."""
