"""What may be asked of an actor of another process, as types: the methods of Ray's own handles are made at run time.

A handle's methods are those of its actor's class, so that a wrong name, argument or result is found before a run."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import ray

    from actors.base_weights import BaseWeightsActor
    from actors.learner import LearnerCalls, LearnerRank
    from actors.prm import PrmActor
    from actors.rollout_worker import RolloutWorkerActor
    from actors.store import StoreActor
    from rollout.buffer import Batch
    from rollout.engines.engine import Pulse

Owner = TypeVar("Owner")
Takes = ParamSpec("Takes")
Answer = TypeVar("Answer")


class Call(Protocol[Takes, Answer]):
    """A method of an actor: called at once, answered later."""

    def remote(self, *args: Takes.args, **kwargs: Takes.kwargs) -> "ray.ObjectRef[Answer]": ...


class Stream(Protocol[Takes, Answer]):
    """A method whose answers come one by one."""

    def remote(self, *args: Takes.args, **kwargs: Takes.kwargs) -> "Iterator[ray.ObjectRef[Answer]]": ...


class CutBatch(Protocol):
    """`StoreActor.next_batch`: the batch, and what its groups are read from."""

    def remote(self, step: int) -> "tuple[ray.ObjectRef[Batch | None], ray.ObjectRef[tuple[bytes, ...]]]": ...


class Beating(Protocol):
    """Any actor that a watch looks after."""

    @property
    def heartbeat(self) -> "Call[[], Pulse]": ...


if TYPE_CHECKING:

    def waits(
        method: Callable[Concatenate[Owner, Takes], Coroutine[object, object, Answer]],
    ) -> Call[Takes, Answer]: ...
    def works(method: Callable[Concatenate[Owner, Takes], Answer]) -> Call[Takes, Answer]: ...
    def yields(method: Callable[Concatenate[Owner, Takes], AsyncIterator[Answer]]) -> Stream[Takes, Answer]: ...

    class StoreHandle:
        heartbeat = waits(StoreActor.heartbeat)
        admit = waits(StoreActor.admit)
        complete = waits(StoreActor.complete)
        release = waits(StoreActor.release)
        next_batch: CutBatch
        mark_trained = waits(StoreActor.mark_trained)
        rewind = waits(StoreActor.rewind)
        sync = waits(StoreActor.sync)
        forget = waits(StoreActor.forget)
        begin_again = waits(StoreActor.begin_again)
        totals = waits(StoreActor.totals)
        close = waits(StoreActor.close)
        next_version = waits(StoreActor.next_version)
        publish = waits(StoreActor.publish)
        wait_newer = waits(StoreActor.wait_newer)
        acknowledge = waits(StoreActor.acknowledge)
        roll_call = waits(StoreActor.roll_call)
        acknowledgements = waits(StoreActor.acknowledgements)

    class WorkerHandle:
        ready = waits(RolloutWorkerActor.ready)
        run = waits(RolloutWorkerActor.run)
        heartbeat = waits(RolloutWorkerActor.heartbeat)
        drain = waits(RolloutWorkerActor.drain)
        workload = waits(RolloutWorkerActor.workload)
        sandbox = waits(RolloutWorkerActor.sandbox)
        sync_weights = waits(RolloutWorkerActor.sync_weights)
        collect_group = waits(RolloutWorkerActor.collect_group)
        continue_from = waits(RolloutWorkerActor.continue_from)
        attempt = waits(RolloutWorkerActor.attempt)
        demonstrate = waits(RolloutWorkerActor.demonstrate)
        close = waits(RolloutWorkerActor.close)

    class _InFolder:
        """Of an actor that writes into the run folder. Ray calls any function with the actor in its process."""

        __ray_call__: Call[..., bool]

    class LearnerHandle:
        """One process, or the group that asks its ranks: these answer alike."""

        ready = works(LearnerCalls.ready)
        in_each_process = works(LearnerCalls.in_each_process)

    class RankHandle:
        meet = works(LearnerRank.meet)
        in_each_process = works(LearnerRank.in_each_process)

    class PrmHandle(_InFolder):
        ready = waits(PrmActor.ready)
        heartbeat = waits(PrmActor.heartbeat)
        load = waits(PrmActor.load)
        train = yields(PrmActor.train)
        save = waits(PrmActor.save)
        score = waits(PrmActor.score)
        score_group = waits(PrmActor.score_group)
        score_canaries = waits(PrmActor.score_canaries)

    class BaseHandle:
        export = waits(BaseWeightsActor.export)
        until_lost = waits(BaseWeightsActor.until_lost)
        close = waits(BaseWeightsActor.close)
