"""The learner as actors: a process for each of its ranks (in most runs one), and one for shared base weights."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from actors.cluster import Handle
from actors.heartbeat import Watched
from configs.api_keys import redact_output
from configs.plugins import search_in
from configs.run import RunConfig
from learner.checkpoint import NO_GROUPS, load_checkpoint, save_checkpoint
from learner.credit import assign_credit
from learner.learner import Learner
from learner.optim import Ranks, join
from learner.packing import build_batch, group_samples, samples_of
from learner.types import StepResult
from rollout.codec import decode_group
from rollout.engines.base_weights import BaseWeights, ExportedBase
from rollout.lifecycle import Batch, Snapshot
from rollout.types import Trajectory


def call_all(ranks: Sequence[Handle], method: str, *args: Any, **kwargs: Any) -> "list[ray.ObjectRef[Any]]":
    """Call a method of every rank with the same arguments; return one reference for each rank."""
    shared = [ray.put(one) for one in args] if len(ranks) > 1 else args
    return [getattr(rank, method).remote(*shared, **kwargs) for rank in ranks]


@ray.remote
class LearnerActor:
    """One rank of the learner. All ranks get the same calls in the same order; the first one writes and publishes."""

    def __init__(self, config: RunConfig, rank: int, size: int) -> None:
        search_in(config.code_path)
        self._config = config
        self._ranks = Ranks(rank=rank, size=size)
        self._meeting: socket.socket | None = None

    def __repr__(self) -> str:
        return f"Learner(rank={self._ranks.rank})"

    def open_meeting(self) -> tuple[str, int]:
        """Open the point at which the ranks meet, in the first of them; return its address."""
        # Not on all interfaces.
        self._meeting = socket.create_server((ray.util.get_node_ip_address(), 0))
        host, port = self._meeting.getsockname()
        return host, port

    def build(
        self, build_learner: Callable[..., Learner], meeting: tuple[str, int] | None, sees_folder: Callable[[], bool]
    ) -> bool:
        """Build the model; of several ranks, meet the others first. Return whether this process sees the run folder."""
        if meeting is not None:
            here = ray.util.get_node_ip_address()
            join(self._ranks, meeting, device=self._config.learner.device, own=self._meeting, here=here)
        self._learner = build_learner() if meeting is None else build_learner(self._ranks)
        return sees_folder()

    def begin_imitation(self) -> None:
        self._learner.reset_optimizer(self._config.cold_start.learning_rate)

    def imitate_step(self, demonstrations: Sequence[Trajectory], learning_rate: float) -> StepResult:
        samples = [
            sample
            for trajectory in demonstrations
            for sample in samples_of(trajectory, [1.0] * len(trajectory.planner_turns), temperature=1.0)
        ]
        return self._learner.imitate_step(samples, learning_rate=learning_rate)

    def begin_reinforcement(self) -> None:
        config = self._config.learner
        num_steps = self._config.num_steps if config.schedule == "linear" else None
        self._learner.reset_optimizer(config.learning_rate, config.warmup_steps, num_steps)
        self._learner.set_reference()

    def train_step(self, batch: Batch) -> StepResult:
        """Train on the groups of a batch."""
        config, samples = self._config, []
        for group in map(decode_group, ray.get(list(batch.refs))):
            assign_credit(group, scheme=config.reward.credit.type)
            samples += group_samples(group, temperature=config.rollout.temperature, version_ages=batch.version_ages)
        return self._learner.train_step(build_batch(samples, microbatch_tokens=config.learner.microbatch_tokens))

    def publish(self, sampling: Handle) -> int:
        """Send the current adapter to dynamic sampling; return its version."""
        adapter = self._learner.adapter(self._config.rollout.engine.adapter_precision)
        if self._learner.writes:
            ray.get(sampling.publish.remote(adapter))
        return adapter.policy_version

    def renumber(self, policy_version: int) -> None:
        """Give the current weights this version number, or keep theirs if it is higher."""
        self._learner.policy_version = max(self._learner.policy_version, policy_version)

    def save_checkpoint(self, folder: Path, snapshot: Snapshot = NO_GROUPS) -> Path:
        return save_checkpoint(self._learner, folder, keep=self._config.learner.keep_checkpoints, snapshot=snapshot)

    def load_checkpoint(self, folder: Path) -> None:
        load_checkpoint(self._learner, folder)


@ray.remote
class BaseWeightsActor(Watched):
    """Holds shared base weights. It is never restarted: its readers would keep pointers to freed memory."""

    def __init__(self, build: Callable[[], BaseWeights]) -> None:
        redact_output()
        self._weights = build()

    async def export(self) -> ExportedBase:
        """Return handles with which one other process reads the weights."""
        return self._weights.export()

    async def close(self) -> None:
        self._weights.close()
