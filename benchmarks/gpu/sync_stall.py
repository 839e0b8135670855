"""How long decoding stands still while versions of an adapter are loaded."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from rollout.engines.engine import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Seconds: of a usual step; of each load from its call to its return; by how much the longest step around each load
    was longer than usual; of all the decoding, which sampled `num_tokens`."""

    step_s: float
    load_s: tuple[float, ...]
    stall_s: tuple[float, ...]
    wall_s: float
    num_tokens: int


def requests(count: int, prompt_tokens: int, max_tokens: int) -> list[GenerationRequest]:
    """Prompts that share nothing, each with a seed of its own."""
    return [
        GenerationRequest(
            trajectory_id=f"t{index}",
            prompt_token_ids=tuple(10 + (index * 7919 + place * 31) % 480 for place in range(prompt_tokens)),
            max_tokens=max_tokens,
            temperature=1.0,
            seed=index,
        )
        for index in range(count)
    ]


async def measure(engine: Any, asked: Sequence[GenerationRequest], adapters: Sequence[tuple[int, bytes]]) -> Stall:
    """Decode all that is asked at once, and meanwhile load one adapter after the other, with a few steps between."""
    ends: list[float] = []
    step = engine._step

    def timed_step() -> None:
        step()
        ends.append(time.perf_counter())

    engine._step = timed_step
    begun, before = time.perf_counter(), engine.sampled_tokens
    try:
        decoding = [asyncio.create_task(engine.generate(replace(request))) for request in asked]
        loads = [await _load_in_passing(engine, one, decoding, ends) for one in adapters]
        await asyncio.gather(*decoding)
    finally:
        engine._step = step
    gaps = [later - earlier for earlier, later in pairwise(ends)]
    usual = median(gaps) if gaps else 0.0
    around = [max((b - a for a, b in pairwise(ends) if a <= end and b >= begin), default=0.0) for begin, end in loads]
    return Stall(
        step_s=usual,
        load_s=tuple(end - begin for begin, end in loads),
        stall_s=tuple(max(0.0, gap - usual) for gap in around),
        wall_s=time.perf_counter() - begun,
        num_tokens=engine.sampled_tokens - before,
    )


async def _load_in_passing(
    engine: Any, adapter: tuple[int, bytes], decoding: Sequence["asyncio.Task[Any]"], ends: Sequence[float]
) -> tuple[float, float]:
    """When the load began and ended."""
    before = len(ends)
    while len(ends) < before + 4 and not all(task.done() for task in decoding):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    begin = time.perf_counter()
    await engine.load_adapter(*adapter)
    return begin, time.perf_counter()
