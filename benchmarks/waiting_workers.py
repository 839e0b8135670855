"""Many simulated workers in one process, and a learner that only takes its time.

For measuring what stands between them: every worker asks the store for work and for weights, proves what it loaded and
brings groups back, by the calls that a real one makes. What it brings was made before, so that a thousand workers need
no more than a core or two.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import ray
from rollout.numbers import packed_millionths
from rollout.store.lifecycle import GroupResult, Lease, Permit

from actors.learner import LearnerCalls
from actors.rollout_worker import Courier, WeightFollower
from configs.learner import LearnerConfig
from configs.run import RunConfig
from envs.datasets.sampler import TaskSampler
from learner.credit import CreditedStep, CreditParts, credit_parts
from learner.types import StepResult, TrainBatch
from reward.judging import OutcomeReward, group_result
from reward.prm.step_text import StepText
from reward.types import ScoredGroup, StepScores
from rollout.buffer import Admission, Batch, WorkerStatus
from rollout.concurrency import WorkerReading
from tests.simulated_parts import GroupShape, LognormalTasks, SimulatedEngine, SimulatedLearner, SimulatedWorker

NUM_PREPARED = 16
"""Different groups; each is brought back again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The simulated load.

    Places of every worker, median seconds of a group, sampled tokens of a trajectory, trajectories of a group, seconds
    of a train step, and bytes of an adapter.
    """

    places: int
    group_s: float
    tokens: int
    group_size: int
    step_s: float
    adapter_bytes: int


@ray.remote(num_cpus=0, max_concurrency=100_000)  # type: ignore[call-overload]
class WorkerHost:
    """The workers with these indices."""

    def __init__(self, store: Any, indices: Sequence[int], load: Load, results: Sequence[GroupResult]) -> None:
        self._workers = {index: WaitingWorker(index, store, load, results) for index in indices}

    def __repr__(self) -> str:
        return "RolloutWorker(host)"

    async def run(self, index: int) -> None:
        """Until the store is closed."""
        await self._workers[index].run()

    async def workload(self, index: int) -> WorkerReading:
        return self._workers[index].reading()

    async def proven(self) -> list[int]:
        """The version that each worker has proven."""
        return [worker.follower.proven_version for worker in self._workers.values()]


class HostedWorker:
    """Is asked what the driver asks of a worker's actor."""

    def __init__(self, host: Any, index: int) -> None:
        self.run = HostedCall(host.run, index)
        self.workload = HostedCall(host.workload, index)


@dataclass(frozen=True, slots=True)
class HostedCall:
    method: Any
    index: int

    def remote(self, *_: Any) -> Any:
        return self.method.remote(self.index)


class WaitingWorker:
    def __init__(self, index: int, store: Any, load: Load, results: Sequence[GroupResult]) -> None:
        self._index = index
        self._store = store
        self._load = load
        self._results = results
        self._random = random.Random(index)
        self._running: dict[Lease, asyncio.Task[None]] = {}
        self._read_at = time.monotonic()
        self._asked_at: float | None = None
        self._waited_s = 0.0
        self._courier = Courier(store)
        self.follower = WeightFollower(SimulatedEngine(), store, index)

    async def run(self) -> None:
        following = asyncio.create_task(self.follower.follow())
        while not (admission := await self._admission()).closed:
            for permit in admission.permits:
                self._running[permit.lease] = asyncio.create_task(self._bring(permit))
            while len(self._running) >= self._load.places:
                await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
        for task in (following, *self._running.values()):
            task.cancel()

    def reading(self) -> WorkerReading:
        """What was since the call before, with the wait that is not over."""
        now = time.monotonic()
        self._count_wait(now)
        elapsed_s, waited_s, self._read_at, self._waited_s = now - self._read_at, self._waited_s, now, 0.0
        return WorkerReading(
            worker=self._index,
            elapsed_s=elapsed_s,
            admission_wait_s=waited_s,
            engine_busy_s=0.0,
            places=self._load.places,
            running=len(self._running),
            computed_tokens=0,
            repeated_tokens=0,
        )

    async def _admission(self) -> Admission:
        self._asked_at = time.monotonic()
        admission: Admission = await self._store.admit.remote(self._status())
        self._count_wait(time.monotonic())
        self._asked_at = None
        return admission

    def _count_wait(self, now: float) -> None:
        if self._asked_at is not None:
            self._waited_s += now - self._asked_at
            self._asked_at = now

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            worker=self._index,
            policy_version=self.follower.proven_version,
            running=tuple(self._running),
            free_places=self._load.places - len(self._running),
        )

    async def _bring(self, permit: Permit) -> None:
        version = self.follower.proven_version
        try:
            await asyncio.sleep(self._load.group_s * self._random.uniform(0.5, 1.5))
            result = self._random.choice(self._results)
            await self._courier.bring(permit.lease, replace(result, versions={version: sum(result.versions.values())}))
        finally:
            del self._running[permit.lease]


class SteppingLearner(SimulatedLearner):
    """Every step makes other weights."""

    def train_step(self, batch: TrainBatch) -> StepResult:
        result = super().train_step(batch)
        with self._torch.no_grad():
            self._weights += 1.0
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCredit:
    """What a learner says of the prepared groups: its log-probs by trajectory and turn, the credit by group."""

    logprobs: Mapping[str, Sequence[str | None]]
    credit: Mapping[str, CreditParts]

    def of(self, num_groups: int) -> "PreparedCredit":
        """As much of it as so many groups bring: those after the first ones under names that nobody asks for."""
        rounds = range(-(-num_groups // NUM_PREPARED))
        return PreparedCredit(
            logprobs={_again(name, one): list(values) for one in rounds for name, values in self.logprobs.items()},
            credit={_again(name, one): deepcopy(parts) for one in rounds for name, parts in self.credit.items()},
        )


def _again(name: str, number: int) -> str:
    return f"{name}@{number}" if number else name


@ray.remote(num_cpus=0)
class PacedLearner(LearnerCalls):
    """Every train step takes `step_s`, whatever is in the batch. It fetches the bytes and does not parse them."""

    def __init__(self, config: RunConfig, load: Load, prepared: PreparedCredit) -> None:
        self._config = config
        self._step_s = load.step_s
        self._learner: Any = SteppingLearner(padding=load.adapter_bytes)
        self._prepared = prepared.of(config.batch_groups)

    def __repr__(self) -> str:
        return "Learner"

    def train_step(self, batch: Batch, payloads: tuple[Any], *, prm_weight: float) -> CreditedStep:
        started, num = time.perf_counter(), len(ray.get(payloads[0]))
        result = self._learner.train_step(
            TrainBatch(microbatches=(), num_loss_tokens=num, num_trajectories=num, num_masked_tokens=0, max_age=0)
        )
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - started)))
        return CreditedStep(
            policy_version=result.policy_version,
            metrics=result.metrics,
            credit=self._prepared.credit,
            turn_logprobs=self._prepared.logprobs,
        )


@ray.remote(num_cpus=0)
class WaitingPrm:
    """Finds every junk decision out."""

    def __repr__(self) -> str:
        return "PRM"

    async def score_canaries(self, step: StepText) -> dict[str, float | None]:
        return {"thanks": 0.01}


@ray.remote(num_cpus=0)
class Prober:
    """Asks the store something small, over and over."""

    def __repr__(self) -> str:
        return "Prober"

    def __init__(self) -> None:
        self._stopped = asyncio.Event()

    async def probe(self, store: Any, every_s: float = 0.05) -> list[float]:
        """Seconds that each answer took, until `stop`. A slow answer puts off no later question."""
        asked: list[asyncio.Task[float]] = []
        while not self._stopped.is_set():
            asked.append(asyncio.create_task(self._ask(store)))
            await asyncio.sleep(every_s)
        return list(await asyncio.gather(*asked))

    async def stop(self) -> None:
        self._stopped.set()

    async def _ask(self, store: Any) -> float:
        started = time.perf_counter()
        await store.next_version.remote()
        return time.perf_counter() - started


def prepared_groups(load: Load) -> list[ScoredGroup]:
    """Groups with signal, with scores of a PRM."""
    shape = GroupShape(tasks=LognormalTasks(median_s=0.0, sigma=0.0), turn_tokens=load.tokens // GroupShape().num_turns)
    worker, tasks = SimulatedWorker(0, shape), TaskSampler({"lookup": 1.0}, seed=0, path=None)
    worker.engine.policy_version = 0
    outcome = OutcomeReward(LearnerConfig(), max_turn_tokens=load.tokens)

    async def groups() -> list[ScoredGroup]:
        return [
            outcome.score_group(await worker.run_group(tasks.task(number), f"g{number:06d}", load.group_size))
            for number in range(NUM_PREPARED)
        ]

    return [replace(one, step_scores=_scores(one)) for one in asyncio.run(groups())]


def prepared_results(groups: Sequence[ScoredGroup], load: Load) -> list[GroupResult]:
    return [group_result(one, duration_s=load.group_s) for one in groups]


def prepared_credit(groups: Sequence[ScoredGroup]) -> PreparedCredit:
    return PreparedCredit(
        logprobs={
            one.id: [packed_millionths(turn.completion.logprobs) for turn in one.turns]
            for scored in groups
            for one in scored.group.trajectories
        },
        credit={one.group.id: credit_parts(one, credit="outcome", prm_weight=0.0) for one in groups},
    )


def _scores(scored: ScoredGroup) -> StepScores:
    raw = tuple((0.5,) * len(one.planner_turns) for one in scored.group.trajectories)
    return StepScores(raw=raw, prm_digest="simulated")
