"""The learner as an actor: one process, or several ranks that are asked, and die, as if they were one."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, NoReturn

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster import PART_LOST, kill
from configs.plugins import search_in
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

if TYPE_CHECKING:
    from actors.handles import Answer, RankHandle, StoreHandle, Takes

GRACE_S = 15.0
"""How long after the first failure the others are waited for: a rank that dies makes the others fail over it."""


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


class LearnerRank(LearnerCalls):
    """One of several processes that are one learner."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        search_in(config.code_path)
        self._config = config
        self._ranks = ranks
        self._meeting: MeetingPoint | None = None

    def __repr__(self) -> str:
        return f"Learner rank {self._ranks.rank}" if hasattr(self, "_ranks") else "Learner rank, not made"

    def meet(self) -> tuple[str, int]:
        """Open the meeting point; returns its address."""
        self._meeting = MeetingPoint(ray.util.get_node_ip_address())
        return self._meeting.host, self._meeting.port

    def join(self, address: tuple[str, int], build_learner: Callable[[Ranks], Learner]) -> None:
        """Meet the other ranks and build this one's learner."""
        here = ray.util.get_node_ip_address()
        join(self._ranks, address, device=self._config.learner.device, own=self._meeting, here=here)
        self._learner = build_learner(self._ranks)


@ray.remote
class LearnerRankActor(LearnerRank):
    """One rank in a process of its own."""


@ray.remote
class LearnerGroupActor:
    """Owns the ranks and asks all of them for whatever it is asked for. It computes nothing, so it can always see that
    one of them has died; then it ends its process, and with it those of the others, which wait for the dead one."""

    def __init__(
        self,
        config: RunConfig,
        build_learner: Callable[[Ranks], Learner],
        place: PlacementGroup,
        claim: Mapping[str, float],
        env: Mapping[str, str],
    ) -> None:
        size = config.learner.num_workers
        self._members: list[RankHandle] = [
            LearnerRankActor.options(
                num_cpus=claim["CPU"],
                num_gpus=claim.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=rank),
                runtime_env={"env_vars": dict(env)},
            ).remote(config, Ranks(rank=rank, size=size))
            for rank in range(size)
        ]
        address = ray.get(self._members[0].meet.remote())
        self._all(LearnerRank.join, address, build_learner)

    def __repr__(self) -> str:
        return f"Learner of {len(self._members)} ranks" if hasattr(self, "_members") else "Learner of ranks, not made"

    def ready(self) -> bool:
        return self._all(LearnerCalls.ready)

    def in_each_process(self, ask: Callable[[], bool]) -> list[bool]:
        answers = ray.get([one.in_each_process.remote(ask) for one in self._members])
        return [answer for each in answers for answer in each]

    def imitate_step(self, demonstrations: Sequence[Trajectory], learning_rate: float) -> StepResult:
        return self._all(LearnerCalls.imitate_step, demonstrations, learning_rate)

    def begin_imitation(self) -> None:
        self._all(LearnerCalls.begin_imitation)

    def begin_reinforcement(self) -> None:
        self._all(LearnerCalls.begin_reinforcement)

    def train_step(
        self, batch: Batch, payloads: "tuple[ray.ObjectRef[tuple[bytes, ...]]]", *, prm_weight: float
    ) -> CreditedStep:
        return self._all(LearnerCalls.train_step, batch, payloads, prm_weight=prm_weight)

    def publish(self, store: "StoreHandle") -> int:
        return self._all(LearnerCalls.publish, store)

    def load_checkpoint(self, folder: Path) -> None:
        self._all(LearnerCalls.load_checkpoint, folder)

    def renumber(self, policy_version: int) -> None:
        self._all(LearnerCalls.renumber, policy_version)

    def save_checkpoint(self, folder: Path, trained: TrainedGroups = NOTHING_TRAINED) -> Path:
        return self._all(LearnerCalls.save_checkpoint, folder, trained)

    def _all(
        self, method: "Callable[Concatenate[LearnerRank, Takes], Answer]", *args: "Takes.args", **kwargs: "Takes.kwargs"
    ) -> "Answer":
        """What the first rank returns, once all have. Raises what a rank raises; ends the process where one is dead."""
        shared = [ray.put(one) for one in args]
        asked = [getattr(one, method.__name__).remote(*shared, **kwargs) for one in self._members]
        waited = asked
        failures: list[Exception] = []
        while waited:
            done, waited = ray.wait(waited, num_returns=1, timeout=GRACE_S if failures else None)
            if not done:
                # They wait for the one that failed, and will for ever.
                self._end_members()
                break
            try:
                ray.get(done[0])
            except PART_LOST as error:
                self._end(error)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return ray.get(asked[0])

    def _end(self, error: Exception) -> NoReturn:
        logging.getLogger(__name__).error("a rank of the learner died: %s", error)
        self._end_members()
        os._exit(1)

    def _end_members(self) -> None:
        for one in self._members:
            kill(one)
