"""A learner in several processes, one actor per rank, that is asked as if it were one and dies as one."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, NoReturn

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster import PART_LOST, kill
from actors.learner import LearnerCalls
from configs.own import search_in
from configs.run import RunConfig
from learner.learner import Learner
from learner.optim import Ranks
from learner.types import StepResult
from reward.credit import CreditedStep
from rollout.buffer import Batch
from rollout.store.lifecycle import NOTHING_TRAINED, TrainedGroups
from rollout.types import Trajectory

if TYPE_CHECKING:
    from actors.handles import Answer, RankHandle, StoreHandle, Takes
    from learner.data_parallel import MeetingPoint

GRACE_S = 15.0
"""How long after the first failure the others are waited for: a rank that dies makes the others fail over it."""


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
        from learner.data_parallel import MeetingPoint

        self._meeting = MeetingPoint(ray.util.get_node_ip_address())
        return self._meeting.host, self._meeting.port

    def join(self, address: tuple[str, int], build_learner: Callable[[Ranks], Learner]) -> None:
        """Meet the other ranks and build this one's learner."""
        from learner.data_parallel import join

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
