"""The proof of the weight sync on its own: a recipe's learner and engine, and every fault that a run must catch,
planted once. Nothing of it needs Ray."""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from configs.base import Precision
from configs.run import RunConfig
from learner.types import Adapter
from ray_jobs.checks.doctor import Finding, show
from rollout.engines.engine import BASE_VERSION, GenerationRequest, PolicyEngine
from rollout.engines.read_back import ReadBack
from rollout.store.adapters import AdapterMismatchError, AdapterStore, PublishedAdapter
from rollout.store.canary import LEAST_MOVE, MAX_MEAN_GAP, Canary, CanaryScores, canary_fault, mean_gap

if TYPE_CHECKING:
    from learner.learner import Learner

Result = TypeVar("Result")

CLEAR_DISTANCE = 4.0
"""Between the canary's log-probs with two versions: rounding, 1 with the demo model, is far below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TakenUp:
    """What an engine returned for a version, and the seconds from its publication to loading, proof and first token."""

    digest: str
    logprobs: Sequence[float]
    read_back: ReadBack
    loaded_s: float
    proven_s: float
    first_token_s: float


def run_sync_doctor(config: RunConfig) -> int:
    """Print what was found; returns 1 if the sync cannot be trusted."""
    import os

    from actors.cluster import QUIET

    os.environ.update(QUIET | {"OMP_NUM_THREADS": str(config.rollout.engine.num_threads)})
    from learner.learner import Learner
    from ray_jobs.run.model_folder import resolve_model
    from rollout.engines.vllm import VllmEngine

    model_path = resolve_model(config.model.path)
    learner = Learner(model_path, config.model, config.learner, seed=config.seed)
    engine = VllmEngine(model_path, config.rollout.engine, config.model, seed=config.seed)
    try:
        with TemporaryDirectory() as folder:
            versions = three_versions(learner, config.rollout.engine.adapter_precision)
            findings = asyncio.run(_all(prove_sync(engine, versions, Path(folder))))
    finally:
        engine.close()
    return show(f"weight sync of '{config.name}', {config.rollout.engine.adapter_mode} adapters", findings)


async def prove_sync(engine: PolicyEngine, adapters: Sequence[Adapter], folder: Path) -> AsyncIterator[Finding]:
    """Publish versions 0 and 1, with faults before, between and after them. `engine` is new; version 2 is for those."""
    store, (zero, one, two) = AdapterStore(folder), adapters
    base = CanaryScores(
        policy_version=BASE_VERSION, learner=_canary(zero).base_logprobs, engine=await engine.score(_canary_ids(zero))
    )
    first = await _take_up(engine, store, zero)
    for finding in _arrived(store, zero, first, before=[base]):
        yield finding
    before = [base, _scores(zero, first.logprobs)]
    # Version 1 is published now, and the engine does not take it up.
    stale = await engine.score(_canary_ids(zero))
    second = await _take_up(engine, store, one)
    for finding in _arrived(store, one, second, before=before):
        yield finding
    held = ReadBack(given=second.read_back.given, held=first.read_back.held)
    yield _planted("the memory of version 0 in place of version 1", held.fault)
    for planted, logprobs in (
        ("the engine left on version 0", stale),
        ("the base model in place of version 1", base.engine),
    ):
        yield _planted(planted, canary_fault(_scores(one, logprobs), before, store.canary_logprobs()))
    for version, planted in ((1, "other weights under number 1, which is in use"), (0, "a step back to number 0")):
        yield _planted(f"{planted}: engine", await _refusal(_load(engine, version, two.data)))
        yield _planted(f"{planted}: store", _refused(store.publish, _published(two, version), two.data))
    yield _unmoved(second, await engine.score(_canary_ids(one)))
    async for finding in _flipped_bits(engine, store, folder, two):
        yield finding
    for what, seconds in (
        ("loaded", second.loaded_s),
        ("proven by the canary", second.proven_s),
        ("the first token of a new request", second.first_token_s),
    ):
        yield Finding(f"from publishing version 1 to {what}", f"{seconds:.2f} s", "ok")


def three_versions(learner: "Learner", precision: Precision) -> list[Adapter]:
    """Version 0 as far from the base model as a cold start would bring it, 1 and 2 each so far on that the canary text
    tells them apart whatever rounding adds."""
    base = learner.adapter().canary
    assert base is not None
    versions: list[Adapter] = []

    def far_enough(canary: Sequence[float]) -> bool:
        if not versions:
            return mean_gap(canary, base.logprobs) >= 3 * MAX_MEAN_GAP
        return math.dist(canary, _logprobs(versions[-1])) >= CLEAR_DISTANCE

    for version, size in ((0, 0.01), (1, 0.001), (2, 0.001)):
        versions.append(_moved(learner, version, size, precision, far_enough))
    return versions


def _moved(
    learner: "Learner", version: int, size: float, precision: Precision, far_enough: Callable[[Sequence[float]], bool]
) -> Adapter:
    """Random steps of the adapter, each twice as long as the one before, until its canary is where it should be."""
    import torch

    generator = torch.Generator().manual_seed(version)
    learner.policy_version = version
    for step in range(16):
        for name, parameter in learner.policy.model.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                parameter.data += size * 2**step * noise
        adapter = learner.adapter(precision)
        if far_enough(_logprobs(adapter)):
            return adapter
    raise RuntimeError(f"no change of the adapter moves the canary text: version {version}")


async def _take_up(engine: PolicyEngine, store: AdapterStore, adapter: Adapter) -> _TakenUp:
    """As a worker does it: load, prove, go on."""
    started, version = time.perf_counter(), adapter.policy_version

    async def timed(result: Awaitable[Result]) -> tuple[Result, float]:
        return await result, time.perf_counter() - started

    published = _published(adapter, version)
    store.publish(published, adapter.data)
    one_token = GenerationRequest(
        trajectory_id="doctor", prompt_token_ids=_canary_ids(adapter), max_tokens=1, temperature=1.0
    )
    prepared = await engine.prepare_adapter(version, store.read(published))
    (digest, loaded_s), (logprobs, proven_s), read_back, (_, first_token_s) = await asyncio.gather(
        timed(engine.load_prepared(prepared)),
        timed(engine.score(_canary_ids(adapter))),
        engine.read_back(),
        timed(engine.generate(one_token)),
    )
    engine.release("doctor")
    return _TakenUp(
        digest=digest,
        logprobs=logprobs,
        read_back=read_back,
        loaded_s=loaded_s,
        proven_s=proven_s,
        first_token_s=first_token_s,
    )


def _arrived(
    store: AdapterStore, adapter: Adapter, taken: _TakenUp, *, before: Sequence[CanaryScores]
) -> Iterator[Finding]:
    """The bytes of a version, and the weights that an engine made of them."""
    version, kept = adapter.policy_version, store.find(adapter.policy_version)
    digests = {
        "learner": hashlib.sha256(adapter.data).hexdigest(),
        "store": kept.digest if kept else "nothing",
        "engine": taken.digest,
    }
    same = set(digests.values()) == {adapter.digest}
    told = ", ".join(f"{place} {digest[:12]}" for place, digest in digests.items())
    yield Finding.of(
        f"version {version}: the same bytes at learner, store and engine",
        f"sha256 {adapter.digest[:12]}" if same else told,
        holds=same,
    )
    held = taken.read_back
    yield Finding.of(
        f"version {version}: the engine's memory holds what it was given",
        held.fault or f"weights read back: sha256 {held.held[:12]}",
        holds=not held.fault,
    )
    scores = _scores(adapter, taken.logprobs)
    fault = canary_fault(scores, before, store.canary_logprobs())
    gap = mean_gap(scores.engine, scores.learner)
    yield Finding.of(
        f"version {version}: engine and learner agree on the canary text",
        fault or f"{gap:.3f} nats apart on average (bound {MAX_MEAN_GAP})",
        holds=not fault,
    )


def _unmoved(taken: _TakenUp, now: Sequence[float]) -> Finding:
    moved = math.dist(taken.logprobs, now)
    return Finding.of(
        "after these refusals: the engine still samples with version 1",
        f"its log-probs of the canary text moved by {moved:.3f}",
        holds=moved < LEAST_MOVE,
    )


async def _flipped_bits(
    engine: PolicyEngine, store: AdapterStore, folder: Path, adapter: Adapter
) -> AsyncIterator[Finding]:
    """One bit of a new version's weights, on each part of its way."""
    published = _published(adapter, adapter.policy_version)
    planted = f"one bit of version {adapter.policy_version} flipped on its way"
    mutated = adapter.data[:-1] + bytes([adapter.data[-1] ^ 1])
    yield _planted(f"{planted} to the store", _refused(store.publish, published, mutated))
    store.publish(published, adapter.data)
    _overwrite(folder, published, mutated)
    yield _planted(f"{planted}, on disk", _refused(store.read, published))
    digest = await _load(engine, adapter.policy_version, mutated)
    other = f"loaded {digest[:12]}, published was {published.digest[:12]}" if digest != published.digest else None
    yield _planted(f"{planted} to the engine", other)


async def _load(engine: PolicyEngine, version: int, adapter: bytes) -> str:
    return await engine.load_prepared(await engine.prepare_adapter(version, adapter))


def _overwrite(folder: Path, published: PublishedAdapter, data: bytes) -> None:
    (file,) = folder.glob(f"*{published.digest[:8]}.safetensors")
    file.write_bytes(data)


def _planted(planted: str, caught: str | None) -> Finding:
    return Finding.of(f"planted: {planted}", f"caught: {caught}" if caught else "NOT caught", holds=bool(caught))


async def _refusal(attempt: Awaitable[object]) -> str | None:
    try:
        await attempt
    except ValueError as error:
        return str(error)
    return None


def _refused(attempt: Callable[..., object], *arguments: object) -> str | None:
    try:
        attempt(*arguments)
    except (ValueError, AdapterMismatchError) as error:
        return str(error)
    return None


async def _all(findings: AsyncIterator[Finding]) -> list[Finding]:
    return [finding async for finding in findings]


def _published(adapter: Adapter, policy_version: int) -> PublishedAdapter:
    return PublishedAdapter(policy_version=policy_version, digest=adapter.digest, canary=adapter.canary)


def _scores(adapter: Adapter, engine: Sequence[float]) -> CanaryScores:
    return CanaryScores(policy_version=adapter.policy_version, learner=_logprobs(adapter), engine=engine)


def _logprobs(adapter: Adapter) -> Sequence[float]:
    return _canary(adapter).logprobs


def _canary_ids(adapter: Adapter) -> tuple[int, ...]:
    return _canary(adapter).token_ids


def _canary(adapter: Adapter) -> Canary:
    assert adapter.canary is not None
    return adapter.canary
