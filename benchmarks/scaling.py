"""What dynamic sampling and the driver cost when very many workers wait for them.

    python -m benchmarks.scaling [--workers 64,256,1000] [--tokens 250] [--seconds 20] [--hosts 2] [--rate 100]

The actor, the buffer and the driver's part of a train step are real. Workers are simulated, many to a process, and
bring back groups that were made before; a train step takes no time, so that nothing else limits the rate. Each row ends
with the rate of a bare actor that only puts the same payloads into the object store. CPU is the kernel's, of the
actor's and the driver's process, per trajectory. A control call is `next_version`, made every 50 ms. Without `--rate`,
workers bring groups as fast as they are taken, and a control call waits behind them.
"""

import argparse
import asyncio
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from actors.cluster import start_ray
from actors.dynamic_sampling import DynamicSampling
from actors.rollout_worker import Courier
from configs.loading import load_run_config
from configs.run import RunConfig
from envs.datasets.sampler import TaskSampler
from learner.types import StepResult
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.progress import batch_groups, group_rows, step_trajectories
from reward.judging import group_summary
from rollout.codec import encode_group
from rollout.lifecycle import Batch, Permit, Snapshot
from rollout.types import Group, GroupSummary, Reward, StepScores
from tests.simulated_parts import NUM_TURNS, GroupShape, SimulatedWorker

GROUP_SIZE = 8
PLACES = 4
NUM_PREPARED = 16
"""Different groups; each is brought back again and again."""
STEPS_BEFORE = 2
"""Steps that are not measured, in which the first batch fills and processes warm up."""
MOST_CPU_MS = 0.4
LEAST_SHARE = 0.6
"""Targets: CPU of actor and driver per trajectory, and the rate as a share of the bare actor's."""

Payload = tuple[bytes, GroupSummary]


def prepared(tokens: int) -> list[Payload]:
    """Return groups with signal and step scores, encoded, with their facts."""
    shape = GroupShape(median_s=0.0, turn_tokens=tokens // NUM_TURNS)
    worker, tasks = SimulatedWorker(0, shape), TaskSampler({"lookup": 1.0}, seed=0)
    worker.engine.policy_version = 0

    async def groups() -> list[Group]:
        names = range(NUM_PREPARED)
        return [await worker.run_group(tasks.task(number), f"g{number:06d}", GROUP_SIZE) for number in names]

    payloads = []
    for group in asyncio.run(groups()):
        for number, trajectory in enumerate(group.trajectories):
            trajectory.reward = Reward(outcome=float(number % 2), total=float(number % 2))
        scores = tuple((0.5,) * len(trajectory.planner_turns) for trajectory in group.trajectories)
        StepScores(raw=scores, prm_digest="simulated").write_to(group)
        payloads.append((encode_group(group), group_summary(group, duration_s=1.0, prm_s=0.0)))
    return payloads


@ray.remote(num_cpus=0, max_concurrency=10_000)  # type: ignore[call-overload]  # Ray's stubs lack it
class WorkerHost:
    """Simulated workers that bring a group back as soon as they may run it."""

    def __init__(self, sampling: Any, indices: Sequence[int], payloads: Sequence[Payload], rate: float) -> None:
        self._sampling = sampling
        self._indices = indices
        self._payloads = payloads
        self._interval_s = 1 / rate
        self._turn_s = 0.0

    async def run(self) -> None:
        await asyncio.gather(*map(self._work, self._indices))

    async def _work(self, index: int) -> None:
        courier = Courier(self._sampling)
        while (permits := await self._sampling.admit.remote(index, 1_000_000, PLACES)) is not None:
            await asyncio.gather(*(self._bring(courier, permit) for permit in permits))

    async def _bring(self, courier: Courier, permit: Permit) -> None:
        now = time.perf_counter()
        self._turn_s = max(now, self._turn_s) + self._interval_s
        await asyncio.sleep(self._turn_s - now)
        await courier.bring(permit.lease, *self._payloads[permit.ordinal % NUM_PREPARED])

    async def put_all(self, bare: Any, num_groups: int) -> None:
        """Send as many payloads to a bare actor, as many at a time as the workers would."""

        async def send(number: int) -> None:
            async with places:
                await bare.put.remote(self._payloads[number % NUM_PREPARED][0])

        places = asyncio.Semaphore(PLACES * len(self._indices))
        await asyncio.gather(*map(send, range(num_groups)))


@ray.remote(num_cpus=0, max_concurrency=10_000)  # type: ignore[call-overload]  # Ray's stubs lack it
class BareActor:
    """Puts what it gets into the object store, and keeps the newest of it."""

    def __init__(self) -> None:
        self._refs: list[Any] = []

    async def put(self, payload: bytes) -> None:
        self._refs = [*self._refs[-1000:], ray.put(payload)]

    async def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
class Prober:
    """Makes a small call over and over, whether the one before was answered or not."""

    async def probe(self, sampling: Any, seconds: float) -> list[float]:
        async def ask() -> float:
            started = time.perf_counter()
            await sampling.next_version.remote()
            return time.perf_counter() - started

        asked = []
        for _ in range(round(seconds / 0.05)):
            asked.append(asyncio.create_task(ask()))
            await asyncio.sleep(0.05)
        return sorted(await asyncio.gather(*asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    workers: int
    groups_per_s: float
    bare_groups_per_s: float
    actor_ms: float
    """CPU per trajectory."""
    driver_ms: float
    p99_ms: float
    """Time of a control call."""

    def row(self) -> str:
        share, cpu_ms = self.groups_per_s / self.bare_groups_per_s, self.actor_ms + self.driver_ms
        marks = ["" if met else " MISSED" for met in (cpu_ms <= MOST_CPU_MS, share >= LEAST_SHARE)]
        return (
            f"| {self.workers} | {self.groups_per_s:.0f} | {self.actor_ms:.3f} | {self.driver_ms:.3f} | "
            f"{cpu_ms:.3f}{marks[0]} | {self.bare_groups_per_s:.0f} | {share:.0%}{marks[1]} | {self.p99_ms:.1f} |"
        )


def make_config(folder: Path, workers: int) -> RunConfig:
    return load_run_config(
        None,
        [
            f"output_dir={folder}",
            "name=scaling",
            f"batch_groups={max(2, workers * PLACES // 2)}",
            "pipeline_depth=1",
            "max_staleness=1000",
            "envs.mix={lookup = 1.0}",
            f"rollout.num_workers={workers}",
            f"rollout.group_size={GROUP_SIZE}",
        ],
    )


def train_step(sampling: Any, folder: RunFolder, step: int) -> int:
    """Do what the driver does in a train step; returns the number of groups."""
    batch: Batch = ray.get(sampling.next_batch.remote(step))
    result = StepResult(policy_version=step, metrics={})
    trajectories = step_trajectories(batch, batch_groups(batch), result, scheme="outcome")
    folder.log_step(trajectories, group_rows(batch, result))
    ray.get(sampling.mark_trained.remote(step, step))
    return len(batch.refs)


def measure(workers: int, options: argparse.Namespace) -> Measurement:
    payloads = prepared(options.tokens)
    with tempfile.TemporaryDirectory() as parent:
        config = make_config(Path(parent), workers)
        with RunFolder.open(config) as folder:
            sampling: Any = DynamicSampling.remote(config)
            ray.get(sampling.restore.remote(Snapshot(), 0, 0))
            indices = [range(workers)[host :: options.hosts] for host in range(options.hosts)]
            shared = ray.put(payloads)
            hosts = [WorkerHost.remote(sampling, some, shared, options.rate / options.hosts) for some in indices]
            running = [host.run.remote() for host in hosts]
            for step in range(1, STEPS_BEFORE + 1):
                train_step(sampling, folder, step)
            pid = ray.get(sampling.pid.remote())
            probing = Prober.remote().probe.remote(sampling, options.seconds)
            started, before = time.perf_counter(), (cpu_s(pid), time.process_time())
            groups, step = 0, STEPS_BEFORE
            while time.perf_counter() - started < options.seconds:
                step += 1
                groups += train_step(sampling, folder, step)
            folder.catch_up()
            wall_s = time.perf_counter() - started
            actor_s, driver_s = cpu_s(pid) - before[0], time.process_time() - before[1]
            answers = ray.get(probing)
            ray.get(sampling.close.remote())
            ray.get(running)
        bare: Any = BareActor.remote()
        each = max(1, groups // options.hosts)
        ray.get(bare.pid.remote())
        started = time.perf_counter()
        ray.get([host.put_all.remote(bare, each) for host in hosts])
        bare_rate = each * options.hosts / (time.perf_counter() - started)
    per_trajectory = 1000 / (groups * GROUP_SIZE)
    return Measurement(
        workers=workers,
        groups_per_s=groups / wall_s,
        bare_groups_per_s=bare_rate,
        actor_ms=actor_s * per_trajectory,
        driver_ms=driver_s * per_trajectory,
        p99_ms=1000 * answers[int(0.99 * len(answers))],
    )


def cpu_s(pid: int) -> float:
    """Return user and system time of a process so far."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="64,256,1000")
    parser.add_argument("--tokens", type=int, default=250, help="sampled tokens of a trajectory")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, with each number of workers")
    parser.add_argument("--hosts", type=int, default=2, help="processes for the workers")
    parser.add_argument("--rate", type=float, default=math.inf, help="groups per second that the workers bring at most")
    options = parser.parse_args(arguments)
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before")
    print("| workers | groups/s | actor, CPU ms | driver | both | bare groups/s | share | control call p99, ms |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    start_ray(load_run_config(None).cluster)
    try:
        for workers in map(int, options.workers.split(",")):
            print(measure(workers, options).row(), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
