"""What an update of the weights takes, and what it costs the requests that run.

    python -m benchmarks.weight_sync [--running 48] [--updates 5] [--every 10] [--seconds 60] [--modes merged native]

Seconds are counted from the moment the learner's bytes are there, as medians. `proven`: the weights were read back and
the engine's log-probs of the canary text compared with the learner's. `first token`: of whatever sampled first with the
new version, a running request in merged mode. `new request`: the first token of one that came with the update, which
waits until the running ones are computed anew. Running are whole groups of the demo recipe, agent, grammar and tools
included. The throughput with updates is compared with that before and after them, in one run.
"""

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

import torch

from configs.loading import load_run_config
from configs.run import RunConfig
from envs.datasets.sampler import TaskSampler
from learner.learner import Learner
from learner.types import Adapter
from ray_jobs.cli_options import DEFAULT_RECIPE
from ray_jobs.run.model_folder import resolve_model
from rollout.engines.engine import GenerationRequest
from rollout.engines.vllm import VllmEngine
from rollout.store.canary import CanaryScores, canary_fault
from rollout.worker import Worker

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Seconds, and the tokens that the running requests were long."""

    loaded_s: float
    proven_s: float
    first_token_s: float
    new_request_s: float
    context_tokens: int


def make_adapters(config: RunConfig, count: int) -> list[Adapter]:
    """Versions from 0 on, each a small step from the one before, as the engine of `config` is given them."""
    learner = Learner(resolve_model(config.model.path), config.model, config.learner, seed=0)
    generator, adapters = torch.Generator().manual_seed(0), []
    for version in range(count):
        for name, parameter in learner.policy.model.named_parameters():
            if "lora_B" in name:
                parameter.data += 1e-3 * torch.randn(parameter.shape, generator=generator)
        learner.policy_version = version
        adapters.append(learner.adapter(config.rollout.engine.adapter_precision))
    return adapters


class Bench:
    def __init__(self, config: RunConfig, adapters: Sequence[Adapter]) -> None:
        self._config = config
        self._worker = Worker(config, resolve_model(config.model.path), index=0)
        self._adapters = iter(adapters)
        self._loaded_at = self._stepped_at = 0.0
        self._before: list[CanaryScores] = []
        self._num_tasks = 0
        self._watch_steps()

    @property
    def engine(self) -> VllmEngine:
        return self._worker.engine

    def close(self) -> None:
        self._worker.close()

    @asynccontextmanager
    async def running(self, num_requests: int) -> AsyncIterator[None]:
        """That many trajectories at a time, once all of them have begun."""
        num_groups = num_requests // self._config.rollout.group_size
        groups = [asyncio.create_task(self._groups()) for _ in range(num_groups)]
        tokens = self.num_sampled()
        while num_groups and self.num_sampled() - tokens < 20 * num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        try:
            yield
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)

    async def update(self) -> Update:
        """Publish a version and follow it to its first tokens."""
        adapter = next(self._adapters)
        assert adapter.canary is not None
        prompt = adapter.canary.token_ids[:20]
        probe = GenerationRequest(trajectory_id="probe", prompt_token_ids=prompt, max_tokens=1, temperature=1.0)
        context_tokens = sum(request.num_tokens for request in list(self.engine._scheduler.running))
        started = time.perf_counter()

        async def timed(result: Awaitable[Result]) -> tuple[Result, float]:
            return await result, time.perf_counter() - started

        prepared = await self.engine.prepare_adapter(adapter.policy_version, adapter.data)
        (_, loaded_s), (logprobs, proven_s), read_back, (_, new_request_s) = await asyncio.gather(
            timed(self.engine.load_prepared(prepared)),
            timed(self.engine.score(adapter.canary.token_ids)),
            self.engine.read_back(),
            timed(self.engine.generate(probe)),
        )
        self.engine.release("probe")
        now = CanaryScores(policy_version=adapter.policy_version, learner=adapter.canary.logprobs, engine=logprobs)
        if fault := read_back.fault or canary_fault(now, self._before):
            raise RuntimeError(fault)
        self._before = [now]
        merged = self._config.rollout.engine.adapter_mode == "merged" and context_tokens
        return Update(
            loaded_s=loaded_s,
            proven_s=proven_s,
            first_token_s=self._stepped_at - started if merged else new_request_s,
            new_request_s=new_request_s,
            context_tokens=context_tokens,
        )

    async def tokens_per_s(self, seconds: float, update_every: float | None = None) -> float:
        started, tokens = time.perf_counter(), self.num_sampled()
        while (left := started + seconds - time.perf_counter()) > 0:
            await asyncio.sleep(min(left, update_every or left))
            if update_every and left > update_every:
                await self.update()
        return (self.num_sampled() - tokens) / (time.perf_counter() - started)

    def num_sampled(self) -> int:
        open_requests = list(self.engine._scheduler.requests.values())
        return self.engine.sampled_tokens + sum(request.num_output_tokens for request in open_requests)

    async def _groups(self) -> None:
        tasks = TaskSampler(self._config.envs.mix, seed=1)
        while True:
            self._num_tasks += 1
            number = self._num_tasks
            await self._worker.run_group(tasks.task(number), f"g{number}", self._config.rollout.group_size)

    def _watch_steps(self) -> None:
        """When an adapter was loaded, and when the first step after that had ended."""
        engine: Any = self.engine
        load, step = engine._load, engine._step

        def watched_load(*arguments: Any) -> Any:
            result = load(*arguments)
            self._loaded_at = time.perf_counter()
            return result

        def watched_step() -> None:
            step()
            if self._stepped_at < self._loaded_at:
                self._stepped_at = time.perf_counter()

        engine._load, engine._step = watched_load, watched_step


async def measure(bench: Bench, mode: str, options: argparse.Namespace) -> str:
    """Print the rows of a mode; returns what updates cost it."""
    await bench.update()
    await print_row(bench, f"{mode}, 0 running", options)
    async with bench.running(options.running):
        await print_row(bench, f"{mode}, {options.running} running", options)
        rates = [await bench.tokens_per_s(options.seconds, every) for every in (None, options.every, None)]
    return (
        f"{mode}: {rates[1]:.0f} tok/s with an update every {options.every:g} s, {rates[0]:.0f} before and "
        f"{rates[2]:.0f} after without: {rates[1] / (rates[0] + rates[2]) * 2:.0%}"
    )


async def print_row(bench: Bench, name: str, options: argparse.Namespace) -> None:
    updates = []
    for _ in range(options.updates):
        await asyncio.sleep(2.0)
        updates.append(await bench.update())
    cells = [name, f"{median(one.context_tokens for one in updates):.0f}"]
    for column in ("loaded_s", "proven_s", "first_token_s", "new_request_s"):
        cells.append(f"{median(getattr(one, column) for one in updates):.2f} s")
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--running", type=int, default=48, help="trajectories at a time, a multiple of the group size")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between updates, for the throughput")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of three measurements of the throughput")
    parser.add_argument("--modes", nargs="+", default=["merged", "native"], choices=["merged", "native"])
    options = parser.parse_args()
    num_versions = 2 * options.updates + 1 + round(options.seconds / options.every)
    print("| | context tokens | loaded | proven | first token | new request |\n| --- | --- | --- | --- | --- | --- |")
    costs = []
    for mode in options.modes:
        config = load_run_config(DEFAULT_RECIPE, [f"rollout.engine.adapter_mode={mode}"])
        bench = Bench(config, make_adapters(config, num_versions))
        try:
            costs.append(asyncio.run(measure(bench, mode, options)))
        finally:
            bench.close()
    print("\n" + "\n".join(costs))


if __name__ == "__main__":
    main()
