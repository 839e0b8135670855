"""Rollout workers: the actor that runs and judges groups, and delivers those of proven weights; the pool of all."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from actors.cluster import PART_LOST, WORKER_GAUGES, Handle, set_gauges
from configs.errors import UserError
from configs.plugins import OwnCodeError, search_in
from configs.reward import OutcomeGuidedConfig
from configs.run import RunConfig
from envs.datasets.generated import GeneratedTask
from envs.datasets.sampler import training_tasks
from envs.types import Task
from reward.judging import (
    GroupJudge,
    OutcomeReward,
    PrmError,
    failed_summary,
    group_summary,
    rescued,
    retried,
)
from reward.scorers.custom import CustomTurnScorer
from rollout.codec import encode_group
from rollout.concurrency import WorkerReading, Workload
from rollout.engines.engine import BASE_VERSION, EngineError, Pulse
from rollout.engines.vllm import VllmEngine
from rollout.filters import SOLVED
from rollout.guide import Earned, Guide, ScoreSteps
from rollout.lifecycle import Permit
from rollout.types import Group, GroupSummary, StepScores, Trajectory
from rollout.worker import Worker

if TYPE_CHECKING:
    from actors.supervisor import Supervisor
    from envs.sandbox import SandboxState

LOAD_LIMIT_S = 300.0
"""A worker that has not proven a version after this time is replaced."""
POOL_LOOK_EVERY_S = 0.5


@ray.remote
class RolloutWorkerActor:
    def __init__(
        self, config: RunConfig, index: int, sampling: Handle, prm: Handle | None, build_worker: Callable[[], Worker]
    ) -> None:
        search_in(config.code_path)
        self._config = config
        self._index = index
        self._sampling = sampling
        self._prm: Handle = prm
        self._prm_digest: str | None = None
        self._worker = build_worker()
        transient = (PrmError, *PART_LOST)
        score = retried(self._scored, transient) if prm else None
        if source := config.reward.turn_scorer:
            score = CustomTurnScorer(source, limit_s=config.reward.timeout_s).score_group
        process = config.reward.credit.type == "process"
        outcome = OutcomeReward(config.learner, max_turn_tokens=config.rollout.max_turn_tokens, process=process)
        self._judge = GroupJudge(outcome, score if process else None, transient=transient)
        self._score_steps, self._earned = score, Earned()
        self._tasks = training_tasks(config)
        self._follower = WeightFollower(self._worker.engine, sampling, index)
        self._courier = Courier(sampling)
        self._workload = Workload(config.rollout, pipeline_depth=config.pipeline_depth)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._draining = False

    def __repr__(self) -> str:
        # Ray calls this also when the constructor has failed.
        return f"RolloutWorker({getattr(self, '_index', 'not built')})"

    async def until_lost(self) -> None:
        """Load and prove every version that is published. Fails if a version cannot be proven, or this process ends."""
        await self._follower.follow()

    async def reach(self, policy_version: int) -> None:
        """Wait until the engine uses this version or a newer one."""
        await self._follower.reach(policy_version)

    async def use_prm(self, prm: Handle) -> None:
        """Call this process reward model from now on: the one before was lost."""
        self._prm = prm

    async def run(self, prm_digest: str | None = None) -> None:
        """Roll out until the buffer is closed, and drop what still runs; or until drained, and finish it."""
        self._prm_digest = prm_digest
        try:
            async with asyncio.TaskGroup() as background:
                while not self._draining:
                    await self._free_place()
                    self._show()
                    asked_at, proven = time.monotonic(), self._follower.proven_version
                    permits = await self._sampling.admit.remote(self._index, proven, self._workload.control.places)
                    self._workload.waited_s += time.monotonic() - asked_at
                    if permits is None:
                        break
                    if permits:
                        self._worker.begin_round(len(permits))
                    for permit in permits:
                        self._running[permit.lease] = background.create_task(self._run_group(permit))
                if self._draining:
                    await asyncio.gather(*self._running.values())
                for task in self._running.values():
                    task.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def heartbeat(self) -> Pulse:
        """Return the pulse of the engine, whose thread may hang while this actor answers."""
        try:
            return await self._worker.engine.pulse()
        except EngineError:
            self._end_with_the_engine()
            raise

    async def drain(self) -> None:
        """Take no more work, so that `run` returns when the running groups have ended."""
        self._draining = True

    async def workload(self) -> WorkerReading:
        """Return what this worker did since the last call."""
        return self._workload.reading(self._worker.engine.load, len(self._running))

    async def sandbox(self) -> "SandboxState | None":
        """Return the state of the code sandbox, which depends on the node; None without one."""
        return self._worker.sandbox

    async def act(self, policy_version: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker, once its engine uses this version or a newer one."""
        await self._follower.reach(policy_version)
        try:
            return await getattr(self._worker, method)(*args, **kwargs)
        finally:
            self._end_with_the_engine()  # so that the call is repeated elsewhere

    async def close(self) -> None:
        self._worker.close()

    async def _free_place(self) -> None:
        """Wait for a place on the engine's cache; at depth 0 for the end of the round, sampled in lockstep."""
        if self._config.pipeline_depth == 0 and self._running:
            await asyncio.wait(self._running.values())
        while len(self._running) >= self._workload.control.observe(self._worker.engine.load, len(self._running)):
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)

    def _show(self) -> None:
        """Set the gauges of this worker."""
        load = self._worker.engine.load
        state = {
            "worker/policy_version": self._follower.proven_version,
            "worker/running": len(self._running),
            "worker/places": self._workload.control.places,
            "worker/kv_usage": load.kv_usage,
            "worker/waiting": load.num_waiting,
        }
        set_gauges(state, WORKER_GAUGES, run=self._config.name, worker=str(self._index))

    async def _run_group(self, permit: Permit) -> None:
        try:
            payload, summary = await self._judged(permit)
            self._end_with_the_engine()
            await self._courier.bring(permit.lease, payload, summary)
        finally:
            del self._running[permit.lease]
            self._show()

    async def _scored(self, group: Group) -> StepScores:
        return await self._prm.score_group.remote(group, self._prm_digest)

    async def _judged(self, permit: Permit) -> tuple[bytes, GroupSummary]:
        """Run and judge a group; return it encoded, and its facts."""
        started = time.monotonic()
        try:
            task = self._tasks.task(permit.task)
            hints = await self._worker.hints(task)
            group = await self._worker.run_group(task, permit.group_id, self._config.rollout.group_size, hints)
            await self._proven()
            prm_s = await self._judge.judge(group)
            summary = group_summary(group, duration_s=time.monotonic() - started, prm_s=prm_s)
            credit, is_wrong = self._config.reward.credit, summary.ending == "all_wrong"
            if isinstance(credit, OutcomeGuidedConfig):
                cost = self._earned.note(task.dataset, summary.facts)
                if is_wrong and self._earned.begin(task.dataset, cost):
                    try:
                        group, summary = await self._rescued(group, summary, credit, hints)
                    finally:  # after a failure others may still follow
                        cost.guided_tokens = summary.facts.get("guided_tokens", 0.0)
                    cost.rescued = summary.facts["rescued"]
            if self._config.planner.memory.type != "none":
                await self._worker.remember([one for one in group.trajectories if one.outcome == SOLVED])
        except OwnCodeError:  # the same scorer would fail on every other worker, so the run ends
            raise
        except Exception as error:
            # The group is tried again elsewhere and fails in the end with this reason; the run continues.
            return b"", failed_summary(error)
        return encode_group(group), summary

    async def _rescued(
        self, group: Group, summary: GroupSummary, credit: OutcomeGuidedConfig, hints: str
    ) -> tuple[Group, GroupSummary]:
        """Run guided attempts for a group without a right one; return it with those that are right, and its facts."""
        started, score, size = time.monotonic(), self._score_steps, credit.candidates
        assert score is not None
        guides = [Guide(task=group.task, score_steps=score, candidates=size) for _ in range(credit.attempts)]
        guided = await self._worker.run_guided(group.task, group.id, guides, hints)
        for guide in guides:  # else its attempts would end unscored, and the run would continue without step scores
            if isinstance(guide.failure, OwnCodeError):
                raise guide.failure
        await self._proven()
        await self._judge.judge(guided)
        return rescued(group, summary, guided, guides, duration_s=time.monotonic() - started)

    async def _proven(self) -> None:
        """Wait until the weights that sampled are proven: those loaded meanwhile may be wrong, and the worker lost."""
        self._end_with_the_engine()
        await self._follower.reach(self._worker.engine.policy_version)

    def _end_with_the_engine(self) -> None:
        """End the process if the engine has died: the actor around it would take work that it cannot do."""
        if self._worker.engine.failure is not None:
            os._exit(1)


class WeightFollower:
    """Loads every version of the weights that is published, and proves to dynamic sampling that the engine uses it."""

    def __init__(self, engine: VllmEngine, sampling: Handle, worker: int) -> None:
        self._engine = engine
        self._sampling = sampling
        self._worker = worker
        self._newer = asyncio.Event()
        self.proven_version = engine.policy_version

    async def follow(self) -> None:
        """Load one version after the other. Raises UserError for one that cannot be proven in time."""
        while True:
            version, (weights,) = await self._sampling.wait_newer.remote(self.proven_version)
            try:
                async with asyncio.timeout(LOAD_LIMIT_S):
                    await self._load(version, await weights)
            except TimeoutError:
                raise UserError(
                    f"worker {self._worker} did not load version {version} within {LOAD_LIMIT_S:.0f} s"
                ) from None
            self.proven_version = version
            self._newer.set()
            self._newer = asyncio.Event()

    async def reach(self, policy_version: int) -> None:
        """Wait until this version or a newer one is proven."""
        while self.proven_version < policy_version:
            await self._newer.wait()

    async def _load(self, version: int, data: bytes) -> None:
        """Load an adapter. The proof is the digest of the bytes and what the engine's memory holds afterwards."""
        prepared = await self._engine.prepare_adapter(version, data)
        digest, read_back = await asyncio.gather(self._engine.load_prepared(prepared), self._engine.read_back())
        await self._sampling.acknowledge.remote(self._worker, version, digest, read_back)


class Courier:
    """Brings finished groups in one call at a time, with all that finished during the call before."""

    def __init__(self, sampling: Handle) -> None:
        self._sampling = sampling
        self._waiting: list[tuple[int, bytes, GroupSummary]] = []
        self._sending: asyncio.Task[None] | None = None

    async def bring(self, lease: int, payload: bytes, summary: GroupSummary) -> None:
        """Return once the group has arrived, together with others. Raises what the call raises."""
        self._waiting.append((lease, payload, summary))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        while self._waiting:
            together, self._waiting = self._waiting, []
            await self._sampling.complete.remote(together)


class WorkerPool:
    """The workers of a run as one policy, outside of training rollouts. Calls of lost workers are repeated."""

    def __init__(self, supervisor: "Supervisor", *, max_open_each: int) -> None:
        """`max_open_each`: open attempts of one worker."""
        self._supervisor = supervisor
        self._max_open_each = max_open_each
        self._open: Counter[int] = Counter()
        self._lost: dict[int, Handle] = {}
        """Workers that failed a call, by index, until they are replaced."""
        self.policy_version = BASE_VERSION
        """The version that was published last: no worker answers before it uses this or a newer one."""

    @property
    def max_open(self) -> int:
        return self._max_open_each * max(1, len(self._supervisor.workers))

    async def collect_group(self, task: Task, group_id: str, group_size: int) -> Group:
        return await self._call("collect_group", task, group_id, group_size)

    async def continue_from(self, trajectory: Trajectory, num_turns: int, count: int) -> list[Trajectory]:
        return await self._call("continue_from", trajectory, num_turns, count)

    async def search(
        self, trajectory: Trajectory, num_turns: int, group_id: str, score_steps: ScoreSteps, candidates: int
    ) -> tuple[list[Trajectory], int]:
        return await self._call("search", trajectory, num_turns, group_id, score_steps, candidates)

    async def attempt(
        self, task: Task, trajectory_id: str, *, group_id: str, temperature: float, seed: int
    ) -> Trajectory:
        return await self._call("attempt", task, trajectory_id, group_id=group_id, temperature=temperature, seed=seed)

    async def demonstrate(self, tasks: Sequence[GeneratedTask]) -> list[Trajectory]:
        return await self._call("demonstrate", tasks)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        while True:
            self._supervisor.check()
            workers = self._supervisor.workers
            ready = [index for index, worker in workers.items() if self._lost.get(index) is not worker]
            if not ready:
                await asyncio.sleep(POOL_LOOK_EVERY_S)
                continue
            index = min(ready, key=self._open.__getitem__)
            worker = workers[index]
            self._open[index] += 1
            try:
                return await worker.act.remote(self.policy_version, method, *args, **kwargs)
            except PART_LOST:
                self._lost[index] = worker
            finally:
                self._open[index] -= 1
