"""The rollout worker as an actor: admitted groups in, judged groups out, always with proven weights."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import ray

from actors.cluster import PART_LOST, WORKER_GAUGES, set_gauges
from configs.own import OwnCodeError, search_in
from configs.run import RunConfig
from envs.datasets.generated import GeneratedTask
from envs.datasets.sampler import training_tasks
from envs.types import Task
from reward.judging import GroupJudge, OutcomeReward, failed_result, group_result
from reward.scorers.custom import CustomTurnScorer
from reward.types import PrmError, StepScores
from rollout.buffer import WorkerStatus
from rollout.concurrency import WorkerReading, Workload
from rollout.engines.engine import BASE_VERSION, EngineError, PolicyEngine, Pulse
from rollout.store.adapters import PublishedAdapter
from rollout.store.lifecycle import GroupResult, Lease, Permit, group_id
from rollout.types import Trajectory, TrajectoryGroup
from rollout.worker import Worker

if TYPE_CHECKING:
    from actors.handles import PrmHandle, StoreHandle
    from envs.sandbox import SandboxState


@ray.remote
class RolloutWorkerActor:
    def __init__(
        self,
        config: RunConfig,
        index: int,
        store: "StoreHandle",
        prm: "PrmHandle | None",
        build_worker: Callable[[], Worker],
    ) -> None:
        search_in(config.code_path)
        self._config = config
        self._index = index
        self._store = store
        self._prm = prm
        self._prm_digest: str | None = None
        self._worker = build_worker()
        turn_scorer = config.reward.turn_scorer and CustomTurnScorer(
            config.reward.turn_scorer, limit_s=config.reward.timeout_s
        )
        self._judge = GroupJudge(
            OutcomeReward(config.learner, max_turn_tokens=config.rollout.max_turn_tokens),
            turn_scorer.score_group if turn_scorer else self._scored if prm else None,
            transient=(PrmError, *PART_LOST),
        )
        self._tasks = training_tasks(config)
        self._follower = WeightFollower(self._worker.engine, store, index)
        self._courier = Courier(store)
        self._workload = Workload(config.rollout, pipeline_depth=config.pipeline_depth)
        self._running: dict[Lease, asyncio.Task[None]] = {}
        self._draining = False

    def __repr__(self) -> str:
        """Ray asks for it once, when the actor is made, or when it cannot be: then that is the error to be told."""
        return f"RolloutWorker({getattr(self, '_index', 'not made')})"

    async def ready(self) -> bool:
        return True

    async def run(self, prm_digest: str | None = None) -> None:
        """Roll out until the buffer is closed, then drop what still runs; or until drained, then finish it.
        `prm_digest`: the weights that the PRM must have, whose scores count."""
        self._prm_digest = prm_digest
        try:
            await self._roll_out()
        except ExceptionGroup as errors:
            self._end_with_the_engine()
            raise errors.exceptions[0] from errors

    async def _roll_out(self) -> None:
        async with asyncio.TaskGroup() as background:
            follower = background.create_task(self._follower.follow())
            while not self._draining:
                await self._free_place()
                self._show()
                admission = await self._workload.waiting(self._store.admit.remote(self._status()))
                if admission.closed:
                    break
                if admission.permits:
                    self._worker.begin_round(len(admission.permits))
                for permit in admission.permits:
                    self._running[permit.lease] = background.create_task(self._run_group(permit))
            if self._draining:
                await asyncio.gather(*self._running.values())
            for task in (follower, *self._running.values()):
                task.cancel()

    async def heartbeat(self) -> Pulse:
        """Through the engine, whose thread may hang while this actor answers."""
        try:
            return await self._worker.engine.pulse()
        except EngineError:
            self._end_with_the_engine()
            raise

    async def drain(self) -> None:
        """Take no more work; `run` ends when what runs has ended."""
        self._draining = True

    async def workload(self) -> WorkerReading:
        """What this worker did since it was asked last."""
        return self._workload.reading(self._index, self._worker.engine.load, len(self._running))

    async def sandbox(self) -> "SandboxState | None":
        """The walls around its code tool, which depend on its machine."""
        return self._worker.sandbox

    async def sync_weights(self, policy_version: int) -> None:
        await self._follower.sync(policy_version)

    async def collect_group(self, task: Task, group_id: str, group_size: int) -> TrajectoryGroup:
        return await self._worker.collect_group(task, group_id, group_size)

    async def continue_from(self, trajectory: Trajectory, num_turns: int, count: int) -> list[Trajectory]:
        return await self._worker.continue_from(trajectory, num_turns, count)

    async def attempt(
        self,
        task: Task,
        trajectory_id: str,
        *,
        group_id: str,
        temperature: float,
        seed: int,
        policy_version: int = BASE_VERSION,
    ) -> Trajectory:
        """Waits until the worker samples with `policy_version` or a newer one; in the RL loop it comes by itself."""
        await self._follower.reached(policy_version)
        return await self._worker.attempt(task, trajectory_id, group_id=group_id, temperature=temperature, seed=seed)

    async def demonstrate(self, tasks: Sequence[GeneratedTask]) -> list[Trajectory]:
        return await self._worker.demonstrate(tasks)

    async def close(self) -> None:
        self._worker.close()

    async def _free_place(self) -> None:
        """Wait until fewer groups run than may; the number that may follows the pressure on the engine's cache. At
        depth 0 wait for the end of the round, whose groups are sampled in lockstep."""
        if self._config.pipeline_depth == 0 and self._running:
            await asyncio.wait(self._running.values())
        while len(self._running) >= self._workload.places(self._worker.engine.load, len(self._running)):
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            worker=self._index,
            policy_version=self._follower.proven_version,
            running=tuple(self._running),
            free_places=max(0, self._workload.num_places - len(self._running)),
        )

    def _show(self) -> None:
        """To whoever watches the cluster, also where no train step ends for long."""
        load = self._worker.engine.load
        state = {
            "worker/policy_version": self._follower.proven_version,
            "worker/running": len(self._running),
            "worker/places": self._workload.num_places,
            "worker/kv_usage": load.kv_usage,
            "worker/waiting": load.num_waiting,
        }
        set_gauges(state, WORKER_GAUGES, run=self._config.name, worker=str(self._index))

    async def _run_group(self, permit: Permit) -> None:
        try:
            await self._courier.bring(permit.lease, await self._judged(permit))
        finally:
            del self._running[permit.lease]
            self._show()
            self._end_with_the_engine()

    async def _scored(self, group: TrajectoryGroup) -> StepScores:
        assert self._prm is not None
        return await self._prm.score_group.remote(group, self._prm_digest)

    async def _judged(self, permit: Permit) -> GroupResult:
        started = time.monotonic()
        try:
            task, name = self._tasks.task(permit.made_of, permit.family), group_id(permit.ordinal)
            group = await self._worker.run_group(task, name, self._config.rollout.group_size)
            self._end_with_the_engine()
            scored = await self._judge.judge(group)
            if self._config.planner.memory.type != "none":
                await self._worker.remember(scored.solved)
        except OwnCodeError:
            # No other worker's scorer would do better: the run ends with what is wrong with it.
            raise
        except Exception as error:
            # The group is tried again elsewhere and in the end failed, with this as the reason; it never ends the run.
            return failed_result(error)
        duration_s = time.monotonic() - started
        return group_result(scored, duration_s=duration_s)

    def _end_with_the_engine(self) -> None:
        """An engine that died leaves its actor alive, to which work would go for ever: the whole process ends."""
        if self._worker.engine.failure is not None:
            os._exit(1)


class WeightFollower:
    def __init__(self, engine: PolicyEngine, store: "StoreHandle", worker: int) -> None:
        self._engine = engine
        self._store = store
        self._worker = worker
        self._loading = asyncio.Lock()
        self._proof = asyncio.Event()
        self.proven_version = engine.policy_version

    async def follow(self) -> None:
        """Load every version that is published, for ever."""
        while True:
            await self._load_newer_than(self.proven_version)

    async def reached(self, policy_version: int) -> None:
        """Waits for this version or a newer one, which `follow` loads; woken by its proof."""
        while self.proven_version < policy_version:
            await self._proof.wait()

    async def sync(self, policy_version: int) -> None:
        """Load the newest version, which must be at least this one."""
        while self.proven_version < policy_version:
            await self._load_newer_than(policy_version - 1)

    async def _load_newer_than(self, policy_version: int) -> None:
        """Load an adapter and prove it to the store: the bytes by their digest, the weights by what the engine's memory
        holds."""
        offer = await self._store.wait_newer.remote(policy_version)
        published = offer.published
        try:
            data = await offer.ref[0]
        except ray.exceptions.ObjectLostError:
            # The store died after it answered; it has the bytes on disk and will offer them again.
            return
        # What was begun is finished: a version that is loaded and not proven could neither be used nor loaded again.
        await asyncio.shield(self._take_up(published, data))

    async def _take_up(self, published: PublishedAdapter, data: bytes) -> None:
        async with self._loading:
            if published.policy_version <= self.proven_version:
                return
            prepared = await self._engine.prepare_adapter(published.policy_version, data)
            digest, read_back = await asyncio.gather(self._engine.load_prepared(prepared), self._engine.read_back())
            await self._store.acknowledge.remote(self._worker, published.policy_version, digest, read_back)
            self.proven_version = published.policy_version
            self._proof.set()
            self._proof = asyncio.Event()


class Courier:
    """One call at a time, with all that came back during the one before: the busier the store is, the fewer calls it
    gets."""

    def __init__(self, store: "StoreHandle") -> None:
        self._store = store
        self._waiting: list[tuple[Lease, GroupResult, asyncio.Future[None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def bring(self, lease: Lease, result: GroupResult) -> None:
        """Returns once the store has written it down. Raises what the store's call raised."""
        brought = asyncio.get_running_loop().create_future()
        self._waiting.append((lease, result, brought))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        await brought

    async def _send(self) -> None:
        while self._waiting:
            together, self._waiting = self._waiting, []
            error: Exception | None = None
            try:
                await self._store.complete.remote([(lease, result) for lease, result, _ in together])
            except Exception as raised:
                error = raised
            for brought in (brought for *_, brought in together if not brought.done()):
                if error is None:
                    brought.set_result(None)
                else:
                    brought.set_exception(error)
