"""The learner as actors: one process for each of its ranks, and in most runs there is one rank."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from actors.cluster import Handle
from configs.own import search_in
from configs.run import RunConfig
from learner.checkpoint import load_checkpoint, save_checkpoint
from learner.learner import Learner
from learner.optim import MeetingPoint, Ranks, join
from learner.packing import build_batch
from learner.samples import samples_of
from learner.types import StepResult
from reward.credit import CreditedStep, credit_parts, group_samples, turn_logprobs
from reward.labels.plan import fresh_error
from reward.stored import scored_group_of
from rollout.buffer import Batch
from rollout.store.lifecycle import NOTHING_TRAINED, TrainedGroups
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
        self._meeting: MeetingPoint | None = None

    def __repr__(self) -> str:
        return f"Learner(rank={self._ranks.rank})"

    def open_meeting(self) -> tuple[str, int]:
        """Open the point at which the ranks meet, in the first of them; return its address."""
        self._meeting = MeetingPoint(ray.util.get_node_ip_address())
        return self._meeting.host, self._meeting.port

    def build(
        self, build_learner: Callable[..., Learner], meeting: tuple[str, int] | None, sees_folder: Callable[[], bool]
    ) -> bool:
        """Build the model; of several ranks, meet the others first. Return whether this process sees the run folder."""
        if meeting is None:
            self._learner = build_learner()
        else:
            here = ray.util.get_node_ip_address()
            join(self._ranks, meeting, device=self._config.learner.device, own=self._meeting, here=here)
            self._learner = build_learner(self._ranks)
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

    def train_step(
        self, batch: Batch, payloads: "tuple[ray.ObjectRef[tuple[bytes, ...]]]", *, prm_weight: float
    ) -> CreditedStep:
        """Train on the groups of a batch. `payloads` refers to their bytes, in a tuple so that Ray does not resolve it.
        `prm_weight` is the weight of step scores in the advantages."""
        config = self._config
        groups = [scored_group_of(payload) for payload in ray.get(payloads[0])]
        credit = {
            scored.group.id: credit_parts(scored, credit=config.reward.credit.type, prm_weight=prm_weight)
            for scored in groups
        }
        samples = [
            sample
            for scored in groups
            for sample in group_samples(
                scored,
                credit[scored.group.id].advantages,
                temperature=config.rollout.temperature,
                version_ages=batch.version_ages,
            )
        ]
        result = self._learner.train_step(build_batch(samples, microbatch_tokens=config.learner.microbatch_tokens))
        return CreditedStep(
            policy_version=result.policy_version,
            metrics={**result.metrics, **fresh_error(groups)},
            skipped=result.skipped,
            credit=credit,
            turn_logprobs={
                one.id: turn_logprobs(one, result.learner_logprobs, batch.version_ages)
                for scored in groups
                for one in scored.group.trajectories
            },
        )

    def publish(self, store: Handle) -> int:
        """Send the current adapter to the store; return its version."""
        adapter = self._learner.adapter(self._config.rollout.engine.adapter_precision)
        if self._learner.writes:
            ray.get(store.publish.remote(adapter))
        return adapter.policy_version

    def renumber(self, policy_version: int) -> None:
        """Give the current weights another version number."""
        self._learner.policy_version = policy_version

    def save_checkpoint(self, folder: Path, trained: TrainedGroups = NOTHING_TRAINED) -> Path:
        return save_checkpoint(self._learner, folder, keep=self._config.learner.keep_checkpoints, trained=trained)

    def load_checkpoint(self, folder: Path) -> None:
        load_checkpoint(self._learner, folder)
