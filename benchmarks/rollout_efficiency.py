"""Rollouts through the whole agent loop against the raw engine on the same prompts, grammar included.

    python -m benchmarks.rollout_efficiency [--tasks 192]

The loop runs first and its requests are recorded; then the engine alone gets the very same requests, all at
once, which no agent could (a turn needs the turn before it). It gets them twice: with an empty prefix cache, so
that it does at least the loop's prefill work, and again with every prompt cached, a bound that no loop can reach.
Above 100% of the first is possible: a turn of the loop finds the tokens of its own last turn in the cache.
"""

import argparse
import asyncio
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

from configs.loading import load_run_config
from envs.datasets.sampler import TaskSampler
from ray_jobs.cli_options import DEFAULT_RECIPE
from ray_jobs.run.model_folder import resolve_model
from rollout.engines.engine import GenerationRequest
from rollout.types import Completion
from rollout.worker import Worker


class RecordingEngine:
    """Passes requests on and remembers them."""

    def __init__(self, engine):
        self.engine = engine
        self.requests: list[GenerationRequest] = []
        self.policy_version = engine.policy_version
        self.release = engine.release

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        return await self.engine.generate(request)


async def measure(worker: Worker, num_tasks: int) -> None:
    sampler = TaskSampler(worker._config.envs.mix, seed=1)
    recording = RecordingEngine(worker.engine)
    agent = worker._build_agent(recording, temperature=1.0)
    places = asyncio.Semaphore(worker._config.rollout.engine.max_num_seqs)

    async def play(index: int) -> None:
        async with places:
            await agent.run(sampler.task(index), trajectory_id=str(index), group_id="benchmark")

    await asyncio.gather(*(play(-index - 1) for index in range(16)))
    recording.requests.clear()
    tokens, started = worker.engine.sampled_tokens, time.perf_counter()
    await asyncio.gather(*(play(index) for index in range(num_tasks)))
    loop_rate = (worker.engine.sampled_tokens - tokens) / (time.perf_counter() - started)
    await worker.engine.load_base()
    raw_rate = await raw_tokens_per_s(worker, recording.requests)
    bound = await raw_tokens_per_s(worker, recording.requests)
    print(f"{len(recording.requests)} model calls of {num_tasks} trajectories; agent loop {loop_rate:.0f} tok/s")
    print(f"raw engine, same prompts: {raw_rate:.0f} tok/s; loop at {loop_rate / raw_rate:.0%} (target 80%)")
    print(f"raw engine, no prefill left to do: {bound:.0f} tok/s; loop at {loop_rate / bound:.0%}")


async def raw_tokens_per_s(worker: Worker, requests: list[GenerationRequest]) -> float:
    started = time.perf_counter()
    completions = await worker.engine.generate_together(requests)
    return sum(len(one.token_ids) for one in completions) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=192)
    options = parser.parse_args()
    config = load_run_config(DEFAULT_RECIPE)
    worker = Worker(config, resolve_model(config.model.path), index=0)
    try:
        asyncio.run(measure(worker, options.tasks))
    finally:
        worker.close()


if __name__ == "__main__":
    main()
