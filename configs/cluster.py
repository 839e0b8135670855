"""Where the actors run."""

from configs.base import Config


class ClusterConfig(Config):
    address: str | None = None
    """A running Ray cluster (`auto`, `host:port`, `ray://...`); none starts one on this machine."""
    dashboard: bool = False
    """Start the Ray dashboard (on loopback) with a cluster of our own."""
