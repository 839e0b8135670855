"""Where the actors run."""

import os

from pydantic import Field, field_validator

from configs.base import Config


class ClusterConfig(Config):
    address: str | None = None
    """A running Ray cluster to join, `auto` or `host:port`; `local` starts one on this machine. None joins the cluster
    that RAY_ADDRESS names, as it does inside of every submitted job, and else starts one on this machine."""
    dashboard: bool = False
    """Start the Ray dashboard (on loopback) with a cluster of our own."""
    patience_s: float = Field(default=60.0, gt=0)
    """Seconds that learner and first rollout workers wait for room. On a cluster that starts machines on demand: as
    long as that takes."""

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
