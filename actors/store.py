"""The store as an actor: everything that must survive. Ledger, buffer and published adapters, all of it on disk.

It may be killed at any moment. Ray starts it again, it reads its folder, and callers' unanswered calls are asked
again; each of them may therefore be asked twice, and means the same then.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import ray

from configs.run import RunConfig
from envs.datasets.sampler import FixedShares
from learner.types import Adapter
from reward.stored import is_readable
from rollout.buffer import Admission, Batch, BufferSettings, GroupBuffer, WorkerStatus
from rollout.engines.engine import Pulse
from rollout.engines.read_back import ReadBack
from rollout.records import append_record, read_records
from rollout.store.adapters import AdapterMismatchError, AdapterStore, PublishedAdapter
from rollout.store.casualties import Loss
from rollout.store.choice import FixedChoice, LearnableChoice, TaskChoice
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupCounts, GroupResult, Lease, TrainedGroups
from rollout.store.turns import Turns

PATIENCE_S = 5.0
"""A worker asks for work again after so long, with the version that it has proven by then."""

MAX_ASKED_AGAIN_PER_S = 50.0
"""More than 250 workers ask again more seldom, so that waiting costs the same however many wait."""

GATHER_S = 0.005
"""Groups that come back within so long are written down in one transaction."""

FORGOTTEN_AT_ONCE = 64
"""Groups whose bytes are deleted before other calls have their turn."""

MAX_OPEN_CALLS = 100_000
"""Each worker has up to two calls that wait, for work and for weights. Those that wake them must find a slot as well.
Not `concurrency_groups`: Ray gives each its own event loop, and what waits in one is not woken from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOffer:
    """`ref` holds the bytes in the object store; it is wrapped so that Ray passes it on unresolved."""

    published: PublishedAdapter
    ref: "tuple[ray.ObjectRef[bytes]]"


class Troubles(TypedDict):
    """Groups that were begun anew, and why groups failed or were begun anew."""

    requeued: int
    reasons: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgements:
    """Versions published, versions that some worker proved, and the seconds from publication to each proof."""

    num_published: int
    num_acknowledged: int
    latencies_s: tuple[float, ...]


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=MAX_OPEN_CALLS)  # type: ignore[call-overload]  # Ray's stubs lack it
class StoreActor:
    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._config = config
        self._adapters = AdapterStore(folder / "adapters")
        self._acks = folder / "adapters" / "acknowledged.jsonl"
        self._ledger = Ledger(folder / "ledger.sqlite")
        newest = self._adapters.newest
        self._buffer = GroupBuffer(
            BufferSettings(
                batch_groups=config.batch_groups,
                pipeline_depth=config.pipeline_depth,
                max_staleness=config.max_staleness,
                max_attempts=config.rollout.max_attempts,
                max_empty_batches=config.max_empty_batches,
                max_tasks=config.max_tasks,
            ),
            self._ledger,
            policy_version=newest.policy_version if newest else 0,
            gather_s=GATHER_S,
            choice=_task_choice(config),
        )
        self._started_at = time.monotonic()
        self._published_at: dict[int, float] = {}
        self._offer: AdapterOffer | None = None
        self._publishing = asyncio.Lock()
        self._newer = asyncio.Event()
        self._turns = Turns()
        self._behind_since: dict[int, float] = {}
        self._checkpoint: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return "Store"

    async def heartbeat(self) -> Pulse:
        """Whoever asks learns that this event loop goes round."""
        return Pulse()

    # --- groups ----------------------------------------------------------------------------------

    async def admit(self, status: WorkerStatus) -> Admission:
        patience_s = max(PATIENCE_S, self._buffer.num_workers / MAX_ASKED_AGAIN_PER_S)
        admission = await self._buffer.admit(status, patience_s=patience_s)
        await self._turns.turn()
        return admission

    async def complete(self, results: Sequence[tuple[Lease, GroupResult]]) -> None:
        """Groups of one worker came back. Returns once all are written down."""
        await asyncio.gather(*(self._buffer.complete(lease, result) for lease, result in results))

    async def release(self, worker: int, reason: str) -> Loss:
        """The worker left, or was lost."""
        self._behind_since.pop(worker, None)
        return await self._buffer.release(worker, reason)

    @ray.method(num_returns=2)
    async def next_batch(self, step: int) -> tuple[Batch | None, tuple[bytes, ...]]:
        """The batch without its payloads, which stay where they are until somebody reads them: two references for
        whoever asks. The caller owns both, so that they outlive this actor."""
        batch = await self._buffer.next_batch(step)
        return (replace(batch, payloads=()), batch.payloads) if batch else (None, ())

    async def mark_trained(self, step: int, policy_version: int, *, refused: str | None = None) -> None:
        await self._buffer.mark_trained(step, policy_version, refused=refused)
        if self._checkpoint is None or self._checkpoint.done():
            self._checkpoint = asyncio.create_task(self._ledger.aside(self._ledger.checkpoint))

    async def rewind(self, step: int, policy_version: int, trained: TrainedGroups) -> list[str]:
        """The policy is that of a checkpoint after `step`, which was `trained` on that; what was trained since is ready
        again. Returns what the ledger had lost of it, in sentences."""
        mended = await self._buffer.rewind(step, policy_version, trained)
        return mended + self._ledger.fail_unreadable(is_readable)

    async def sync(self) -> TrainedGroups:
        """What was written so far survives a power cut. Returns what was trained until now."""
        trained = self._ledger.trained_groups()
        await self._ledger.aside(self._ledger.sync)
        return trained

    async def forget(self, step: int) -> None:
        """No checkpoint from before this step is left."""
        num = FORGOTTEN_AT_ONCE
        while num == FORGOTTEN_AT_ONCE:
            num = self._ledger.forget(step, at_most=FORGOTTEN_AT_ONCE)
            await asyncio.sleep(0)

    async def begin_again(self) -> None:
        """No worker lives that could know of the leases in the ledger: all their groups are queued again."""
        await self._buffer.release(None, "the run was cut off")

    async def totals(self) -> tuple[GroupCounts, dict[str, float], Troubles]:
        """The counts, checked against the file; the facts added up over all groups; what went wrong."""
        troubles = Troubles(requeued=self._ledger.num_requeued(), reasons=self._ledger.reasons())
        return self._ledger.verify(), self._ledger.reported(), troubles

    async def close(self) -> None:
        await self._buffer.close()

    # --- adapters --------------------------------------------------------------------------------

    async def next_version(self) -> int:
        """The lowest version number that was never used."""
        return self._adapters.next_version

    async def publish(self, adapter: Adapter) -> None:
        """Make a version available. Raises ValueError when the number is not new."""
        published = PublishedAdapter(policy_version=adapter.policy_version, digest=adapter.digest)
        async with self._publishing:
            self._published_at.setdefault(adapter.policy_version, time.monotonic())
            # In a thread: hundreds of megabytes to a disk take seconds, in which groups come and go.
            await asyncio.to_thread(self._adapters.publish, published, adapter.data)
            if self._offer is None or published != self._offer.published:
                self._offer = await asyncio.to_thread(_offer, published, adapter.data)
        self._newer.set()
        self._newer = asyncio.Event()

    async def wait_newer(self, policy_version: int) -> AdapterOffer:
        """The newest adapter above `policy_version`. Waits; woken by `publish`."""
        while (offer := await self._newest_offer()) is None or offer.published.policy_version <= policy_version:
            await self._newer.wait()
            await self._turns.turn()
        return offer

    async def _newest_offer(self) -> AdapterOffer | None:
        """That of the version that was published last. An actor that was just started reads the bytes again."""
        if self._offer is None and self._adapters.newest is not None:
            async with self._publishing:
                newest = self._adapters.newest
                if self._offer is None:
                    self._offer = _offer(newest, await asyncio.to_thread(self._adapters.read, newest))
        return self._offer

    async def acknowledge(self, worker: int, policy_version: int, digest: str, read_back: ReadBack) -> None:
        """A worker samples with a version from now on, and gets work. `digest`: of the bytes that it received;
        `read_back`: the weights that its engine's memory holds. Raises AdapterMismatchError where one of them is
        wrong."""
        published = self._adapters.find(policy_version)
        if published is None or digest != published.digest:
            raise AdapterMismatchError(
                f"worker {worker} loaded {digest[:12]} as version {policy_version}, published was "
                f"{published.digest[:12] if published else 'nothing'}"
            )
        if read_back.fault:
            raise AdapterMismatchError(f"worker {worker}, version {policy_version}: {read_back.fault}")
        latency_s = round(time.monotonic() - self._published_at.get(policy_version, self._started_at), 4)
        append_record(self._acks, {"worker": worker, "policy_version": policy_version, "latency_s": latency_s})
        self._behind_since.pop(worker, None)
        await self._buffer.prove(worker, policy_version)

    async def roll_call(self, workers: Sequence[int], patience_s: float) -> list[int]:
        """These workers roll out, and no others. Returns those of them that were behind the newest version at every
        call for so long, and proved none meanwhile. New versions that come while they are behind are no excuse."""
        await self._buffer.roll_call(workers)
        newest, now = self._adapters.newest, time.monotonic()
        late = self._buffer.unproven(newest.policy_version) if newest else []
        self._behind_since = {one: self._behind_since.get(one, now) for one in late}
        return [one for one, since in self._behind_since.items() if now - since > patience_s]

    async def acknowledgements(self) -> Acknowledgements:
        rows = list(read_records(self._acks)) if self._acks.exists() else []
        return Acknowledgements(
            num_published=self._adapters.num_published,
            num_acknowledged=len({row["policy_version"] for row in rows}),
            latencies_s=tuple(row["latency_s"] for row in rows),
        )


def _task_choice(config: RunConfig) -> TaskChoice:
    shares = FixedShares(config.envs.mix, seed=config.seed)
    if config.envs.choice == "mix":
        return FixedChoice(names=shares.names, family_of=shares.name)
    return LearnableChoice(names=tuple(sorted(shares.names)), seed=config.seed)


def _offer(published: PublishedAdapter, data: bytes) -> AdapterOffer:
    """The store puts the bytes itself: Ray loses objects whose owner died, and learners may die."""
    return AdapterOffer(published=published, ref=(ray.put(data),))
