"""The learner as an actor."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from configs.own import search_in
from configs.run import RunConfig
from learner.checkpoint import load_checkpoint, save_checkpoint
from learner.learner import Learner
from learner.packing import build_batch
from learner.samples import samples_of
from learner.types import StepResult
from reward.credit import CreditedStep, credit_parts, group_samples, turn_logprobs
from reward.labels.plan import fresh_error
from reward.stored import scored_group_of
from rollout.buffer import Batch
from rollout.store.lifecycle import NOTHING_TRAINED, TrainedGroups
from rollout.types import Trajectory

if TYPE_CHECKING:
    from actors.handles import StoreHandle


class LearnerCalls:
    """What a learner is asked for, whether it is alone or one of several ranks."""

    _config: RunConfig
    _learner: Learner

    def ready(self) -> bool:
        return True

    def in_each_process(self, ask: Callable[[], bool]) -> list[bool]:
        """What a question has for an answer where the learner is: of several ranks, each rank's."""
        return [ask()]

    def imitate_step(self, demonstrations: Sequence[Trajectory], learning_rate: float) -> StepResult:
        samples = [
            sample
            for trajectory in demonstrations
            for sample in samples_of(trajectory, [1.0] * len(trajectory.planner_turns), temperature=1.0)
        ]
        return self._learner.imitate_step(samples, learning_rate=learning_rate)

    def begin_imitation(self) -> None:
        self._learner.reset_optimizer(self._config.cold_start.learning_rate)

    def begin_reinforcement(self) -> None:
        config = self._config.learner
        num_steps = self._config.num_steps if config.schedule == "linear" else None
        self._learner.reset_optimizer(config.learning_rate, config.warmup_steps, num_steps)
        self._learner.set_reference()

    def train_step(
        self, batch: Batch, payloads: "tuple[ray.ObjectRef[tuple[bytes, ...]]]", *, prm_weight: float
    ) -> CreditedStep:
        """`payloads` refers to the batch's groups as bytes, wrapped so that Ray passes it on unresolved. `prm_weight`
        is the recipe's, or what alarms have left of it."""
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

    def publish(self, store: "StoreHandle") -> int:
        """Hand the current adapter to the store; returns its version. Of several ranks one does."""
        adapter = self._learner.adapter(self._config.rollout.engine.adapter_precision)
        if self._learner.writes:
            ray.get(store.publish.remote(adapter))
        return adapter.policy_version

    def load_checkpoint(self, folder: Path) -> None:
        load_checkpoint(self._learner, folder)

    def renumber(self, policy_version: int) -> None:
        """The weights as they are get another version number: theirs was given out before."""
        self._learner.policy_version = policy_version

    def save_checkpoint(self, folder: Path, trained: TrainedGroups = NOTHING_TRAINED) -> Path:
        return save_checkpoint(self._learner, folder, keep=self._config.learner.keep_checkpoints, trained=trained)


@ray.remote
class LearnerActor(LearnerCalls):
    """A learner in one process."""

    def __init__(self, config: RunConfig, build_learner: Callable[[], Learner]) -> None:
        search_in(config.code_path)
        self._config = config
        self._learner = build_learner()

    def __repr__(self) -> str:
        return "Learner"
