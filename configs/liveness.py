"""When a part that does not answer is taken for one that hangs."""

from pydantic import Field

from configs.base import Config


class LivenessConfig(Config):
    answer_s: float = Field(default=300.0, gt=0)
    """Seconds after which a rollout worker or the store is killed and replaced that answers nothing, or whose engine
    computes nothing although requests are open; 20 times the median of the run's answers where that is more."""
    work_s: float = Field(default=1800.0, gt=0)
    """The same for a call of the learner (a train step, a checkpoint) and for the PRM."""
    start_s: float = Field(default=3600.0, gt=0)
    """The same for a process that starts, and for the first call of each kind: it may load, compile or download."""
