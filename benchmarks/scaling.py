"""What orchestration costs: CPU time per trajectory of everything but model and tools, for ever more workers.

    python -m benchmarks.scaling [--workers 4,16,64] [--median-s 20]

Real Ray actors, ledger, buffer, store and training loop on this machine; the engines sleep and the learner counts
(`benchmarks/simulated_parts.py`). Every worker has 32 trajectories in flight, in groups of 8, of some 250 sampled
tokens each. CPU time is the kernel's, of whole processes, over the trajectories of the measured steps. What must not
grow with the workers is the store's and the driver's share: they are one process each, whatever the size of the run.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import ray

from actors.cluster import start_ray, stop_ray
from benchmarks.simulated_parts import GroupShape, SimulatedLearner, SimulatedWorker
from configs.loading import load_run_config
from configs.run import RunConfig
from ray_jobs.cast import Cast
from ray_jobs.chaos import part_of
from ray_jobs.console import Console
from ray_jobs.phases import cold_start
from ray_jobs.run import Run
from ray_jobs.run_folder import RunFolder
from ray_jobs.supervisor import Supervisor
from ray_jobs.train import continue_training, train_step
from rollout.simulated_tasks import LognormalTasks

GROUP_SIZE = 8
GROUPS_PER_WORKER = 4
SIGMA = 0.6
STEPS_BEFORE = 2
"""Steps that are not measured: processes start, imports and first versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """CPU seconds by kind of process, over so many trajectories and seconds."""

    workers: int
    trajectories: float
    wall_s: float
    cpu_s: dict[str, float]
    worker_mib: float

    def row(self) -> str:
        def per_trajectory(*kinds: str) -> str:
            return f"{1000 * sum(self.cpu_s.get(kind, 0.0) for kind in kinds) / self.trajectories:.2f}"

        cells = [
            str(self.workers),
            str(self.workers * GROUPS_PER_WORKER * GROUP_SIZE),
            f"{self.trajectories / self.wall_s:.1f}",
            per_trajectory("store", "driver"),
            per_trajectory("store"),
            per_trajectory("driver"),
            per_trajectory("rollout"),
            per_trajectory("learner"),
            per_trajectory("ray"),
            f"{self.worker_mib:.0f}",
        ]
        return f"| {' | '.join(cells)} |"


HEADER = """\
| workers | in flight | trajectories/s | store + driver, ms | store | driver | worker | learner | Ray | MiB/worker |
| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def make_config(folder: Path, workers: int, num_steps: int) -> RunConfig:
    """Two batches are in flight, one is being trained, and one is what the depth leaves as slack."""
    running = workers * GROUPS_PER_WORKER
    return load_run_config(
        None,
        [
            f"output_dir={folder}",
            "name=scaling",
            f"num_steps={num_steps}",
            f"batch_groups={running // 2}",
            "pipeline_depth=3",
            "max_staleness=1000",
            "envs.mix={lookup = 1.0}",
            f"rollout.num_workers={workers}",
            f"rollout.group_size={GROUP_SIZE}",
            f"rollout.engine.max_num_seqs={GROUPS_PER_WORKER * GROUP_SIZE // 2}",
            "rollout.engine.num_threads=1",
            "learner.num_threads=1",
            "cold_start.num_demonstrations=0",
            "cluster.patience_s=300",
        ],
    )


def measure(workers: int, shape: GroupShape, num_steps: int, padding: int) -> Measurement:
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), workers, STEPS_BEFORE + num_steps)
        with RunFolder.open(config, with_prm=False, resume=False) as run_folder, _ray(workers + 2):
            cast = Cast(
                config,
                run_folder,
                build_learner=partial(SimulatedLearner, num_groups=100_000, padding=padding),
                build_worker=partial(SimulatedWorker, shape=shape),
            )
            for index in range(workers):
                cast.start_worker(index)
            cast.wait_until_ready()
            run = Run(config=config, console=Console(), folder=run_folder, cast=cast)
            cold_start(run)
            return _measure_steps(run, num_steps)


def _measure_steps(run: Run, num_steps: int) -> Measurement:
    """The loop of `reinforce`, with a look at the clocks in between."""
    training = continue_training(run)
    ray.get(run.cast.store.begin_again.remote())
    with Supervisor(run) as rollouts:
        for _ in range(STEPS_BEFORE):
            train_step(run, training, rollouts)
        before, started = _cpu_seconds(), time.perf_counter()
        for _ in range(num_steps):
            train_step(run, training, rollouts)
        after, wall_s = _cpu_seconds(), time.perf_counter() - started
        memory = [psutil.Process(pid).memory_full_info().pss for pid in _processes()["rollout"]]
    return Measurement(
        workers=run.config.rollout.num_workers,
        trajectories=sum(row["rollout/trajectories"] for row in training.rows[-num_steps:]),
        wall_s=wall_s,
        cpu_s={kind: after[kind] - before.get(kind, 0.0) for kind in after},
        worker_mib=sum(memory) / len(memory) / 2**20,
    )


def _cpu_seconds() -> dict[str, float]:
    """User and system time so far, added up over the processes of each kind."""
    return {kind: sum(map(_cpu_s, pids)) for kind, pids in _processes().items()}


def _processes() -> dict[str, list[int]]:
    """This process, the actors that it started, and under `ray` all else that Ray runs for them."""
    found: dict[str, list[int]] = {"driver": [os.getpid()]}
    for process in psutil.Process().children(recursive=True):
        kind = part_of(" ".join(process.cmdline())) or "ray"
        found.setdefault(kind, []).append(process.pid)
    return found


def _cpu_s(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _ray(num_cpus: int):
    """Ray, told of more cores than there are: sleeping engines need none."""
    cores, os.cpu_count = os.cpu_count, lambda: num_cpus
    try:
        start_ray(load_run_config(None).cluster)
        yield
    finally:
        os.cpu_count = cores
        stop_ray()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="4,16,64")
    parser.add_argument("--steps", type=int, default=6, help="train steps that are measured")
    parser.add_argument("--median-s", type=float, default=20.0, help="median seconds of a group")
    parser.add_argument("--adapter-mib", type=float, default=1.0, help="size of an adapter")
    options = parser.parse_args(arguments)
    shape = GroupShape(tasks=LognormalTasks(median_s=options.median_s, sigma=SIGMA))
    rows = [
        measure(workers, shape, options.steps, round(options.adapter_mib * 2**20)).row()
        for workers in map(int, options.workers.split(","))
    ]
    print("\n".join([HEADER, *rows]))


if __name__ == "__main__":
    main()
