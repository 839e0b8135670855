"""What orchestration costs and how fast it is when every worker waits for it.

    python -m benchmarks.scaling [--workers 64,256,1000] [--tokens 250] [--rate 600] [--seconds 30]

Real Ray actors, ledger, buffer, store and training loop on this machine. The learner is the limit: a train step takes
the time that `--rate` groups per second allow, and groups are back long before. So all workers always wait for
admission, at a depth at which all their places fit into the bound of live groups. The workers are simulated, many to a
process, and bring back groups that were made before (`benchmarks/waiting_workers.py`), with scores of a PRM.

CPU time is the kernel's, of whole processes, over the trajectories of the measured steps; `all` has everything that
runs for the measurement in it, so that cores / `all` is what the machine can do at most. A control call is
`next_version`, asked every 50 ms by a process of its own, whether the call before was answered or not.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import ray
from ray_jobs.run.actors import RunActors
from ray_jobs.run.supervisor import Supervisor

from actors.cluster import start_ray, stop_ray
from benchmarks.waiting_workers import (
    HostedWorker,
    Load,
    PacedLearner,
    Prober,
    WaitingPrm,
    WorkerHost,
    prepared_credit,
    prepared_groups,
    prepared_results,
)
from configs.loading import load_run_config
from configs.run import RunConfig
from ray_jobs.run.console import Console
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.run import Run
from ray_jobs.train import continue_training, train_step
from tests.faults.job import part_of

GROUP_SIZE = 8
PLACES = 4
STEPS_BEFORE = 2
"""Steps that are not measured: the first batch fills up, processes warm up."""

LEAST_GROUPS_PER_S = 500
MOST_P99_MS = 50.0
FEW_WORKERS = 64
MOST_CPU_MS_OF_FEW = 0.5
MOST_CPU_MS = 1.0
"""The targets. CPU is that of store and driver together, per trajectory."""


class WaitingActors(RunActors):
    """Its workers stand in a few processes of their own. Nobody watches whether they live."""

    def __init__(self, config: RunConfig, folder: RunFolder, load: Load, num_hosts: int) -> None:
        groups = prepared_groups(load)
        self._paced = lambda: PacedLearner.remote(config, load, ray.put(prepared_credit(groups)))
        super().__init__(config, folder, build_learner=_none, build_worker=_none)
        self.prm = WaitingPrm.remote()
        results, everybody = ray.put(prepared_results(groups, load)), range(config.rollout.num_workers)
        self._hosts = [
            WorkerHost.remote(self.store, everybody[host::num_hosts], load, results) for host in range(num_hosts)
        ]
        self._hosted = [HostedWorker(self._hosts[index % num_hosts], index) for index in everybody]

    @property
    def prm_digest(self) -> None:
        """Nobody asks this PRM for the scores of a group; those were made before."""
        return None

    @property
    def worker_indices(self) -> tuple[int, ...]:
        return tuple(range(len(self._hosted)))

    def worker(self, index: int) -> HostedWorker:
        return self._hosted[index]

    def wait_for_proofs(self) -> None:
        """Returns once every worker has proven the version that was published last."""
        newest = self.newest_version()
        while min(min(ray.get(host.proven.remote())) for host in self._hosts) < newest:
            time.sleep(0.1)

    def _start_learner(self) -> Any:
        return self._paced()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Over the measured steps. `waiting`: share of the workers' time that they waited for admission; `loop_s`: seconds
    per step between publishing and asking for the next batch; `reached_s`: from publication until the last worker had
    proven the version, of each of `num_published` versions that no worker skipped."""

    workers: int
    depth: int
    tokens: int
    groups: int
    wall_s: float
    waiting: float
    cpu_s: dict[str, float]
    answers_s: list[float]
    reached_s: list[float]
    num_published: int
    loop_s: float

    @property
    def groups_per_s(self) -> float:
        return self.groups / self.wall_s

    @property
    def p99_ms(self) -> float:
        return 1000 * _quantile(self.answers_s, 0.99)

    def cpu_ms(self, *kinds: str) -> float:
        """Of processes of these kinds, by default of all, per trajectory."""
        return 1000 * sum(self.cpu_s.get(kind, 0.0) for kind in kinds or self.cpu_s) / self.groups / GROUP_SIZE

    def row(self) -> str:
        cells = [
            f"{self.workers} | {self.depth} | {self.tokens} | {100 * self.waiting:.0f}% | {self.groups_per_s:.0f}",
            f"{self.cpu_ms('store', 'driver'):.2f} | {self.cpu_ms('store'):.2f} | {self.cpu_ms('driver'):.2f}",
            f"{self.cpu_ms():.2f} | {1000 * _quantile(self.answers_s, 0.5):.1f} | {self.p99_ms:.1f}",
            f"{1000 * max(self.answers_s):.0f} | {_quantile(self.reached_s, 0.5):.2f} | {self.loop_s:.2f}",
        ]
        return f"| {' | '.join(cells)} |"

    def verdicts(self) -> Iterator[str]:
        """Each target beside what came out."""
        most_ms = MOST_CPU_MS if self.workers > FEW_WORKERS else MOST_CPU_MS_OF_FEW
        rate, reached, cpu_ms = self.groups_per_s, len(self.reached_s), self.cpu_ms("store", "driver")
        for name, value, bound, holds in (
            ("groups/s", f"{rate:.0f}", f">= {LEAST_GROUPS_PER_S}", rate >= LEAST_GROUPS_PER_S),
            ("control call, p99", f"{self.p99_ms:.1f} ms", f"<= {MOST_P99_MS} ms", self.p99_ms <= MOST_P99_MS),
            ("store + driver", f"{cpu_ms:.2f} ms", f"<= {most_ms} ms", cpu_ms <= most_ms),
            ("versions that reached all", str(reached), f"= {self.num_published}", reached == self.num_published),
        ):
            yield f"  {'met   ' if holds else 'MISSED'}  {name}: {value} (target {bound})"


HEADER = """\
| workers | depth | tokens | waiting | groups/s | store + driver, ms | store | driver | all | p50, ms | p99 | max \
| proven, s | loop |
| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def make_config(folder: Path, workers: int, depth: int, batch_groups: int, num_steps: int) -> RunConfig:
    return load_run_config(
        None,
        [
            f"output_dir={folder}",
            "name=scaling",
            f"num_steps={num_steps}",
            f"batch_groups={batch_groups}",
            f"pipeline_depth={depth}",
            "max_staleness=1000",
            "envs.mix={lookup = 1.0}",
            f"rollout.num_workers={workers}",
            f"rollout.group_size={GROUP_SIZE}",
            "learner.checkpoint_every=1000000",
            "learner.num_threads=1",
            "cold_start.num_demonstrations=0",
        ],
    )


def measure(workers: int, options: argparse.Namespace) -> Measurement:
    batch_groups = max(1, workers * PLACES // (options.depth + 1))
    step_s = batch_groups / options.rate
    num_steps = max(3, round(options.seconds / step_s))
    load = Load(
        places=PLACES,
        group_s=step_s / 4,
        tokens=options.tokens,
        group_size=GROUP_SIZE,
        step_s=step_s,
        adapter_bytes=round(options.adapter_mib * 2**20),
    )
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), workers, options.depth, batch_groups, STEPS_BEFORE + num_steps + 1)
        with RunFolder.open(config, with_prm=False) as run_folder, _ray():
            actors = WaitingActors(config, run_folder, load, options.hosts)
            run = Run(config=config, console=Console(), folder=run_folder, actors=actors)
            return _measure_steps(run, num_steps, load)


def _measure_steps(run: Run, num_steps: int, load: Load) -> Measurement:
    """The loop of `reinforce`, with a look at the clocks in between."""
    actors: Any = run.actors
    actors.publish_anew()
    training, prober = continue_training(run), Prober.remote()
    with Supervisor(run) as rollouts:
        for _ in range(STEPS_BEFORE):
            train_step(run, training, rollouts)
        probing = prober.probe.remote(actors.store)
        before, started = _cpu_seconds(), time.perf_counter()
        for _ in range(num_steps):
            train_step(run, training, rollouts)
        wall_s = time.perf_counter() - started
        run.folder.catch_up()
        after = _cpu_seconds()
        ray.get(prober.stop.remote())
        answers = ray.get(probing)
        actors.wait_for_proofs()
    counts, _, _ = ray.get(actors.store.totals.remote())
    assert counts.trained == run.config.batch_groups * (STEPS_BEFORE + num_steps), counts
    rows = training.rows[-num_steps:]
    return Measurement(
        workers=run.config.rollout.num_workers,
        depth=run.config.pipeline_depth,
        tokens=load.tokens,
        groups=run.config.batch_groups * num_steps,
        wall_s=wall_s,
        waiting=fmean(row["util/backpressure"] for row in rows),
        cpu_s={kind: after[kind] - before.get(kind, 0.0) for kind in after},
        answers_s=answers,
        reached_s=_seconds_until_all_proved(run, since=actors.newest_version() - num_steps + 1),
        num_published=num_steps,
        loop_s=(wall_s - sum(row["time/step_s"] for row in rows)) / num_steps,
    )


def _seconds_until_all_proved(run: Run, *, since: int) -> list[float]:
    """Of every version from this one on that each worker proved: some skip one that is followed at once by the next."""
    seconds: dict[int, list[float]] = {}
    for line in (run.folder.path / "adapters" / "acknowledged.jsonl").read_text().splitlines():
        row = json.loads(line)
        seconds.setdefault(row["policy_version"], []).append(row["latency_s"])
    everybody = run.config.rollout.num_workers
    return [max(found) for version, found in seconds.items() if version >= since and len(found) == everybody]


def _quantile(values: Sequence[float], share: float) -> float:
    """Infinite of no values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else math.inf


def _cpu_seconds() -> dict[str, float]:
    """User and system time so far, added up over the processes of each kind: this one, the actors that it started, and
    under `ray` all else that Ray runs for them."""
    found: dict[str, float] = {"driver": _cpu_s(os.getpid())}
    for process in psutil.Process().children(recursive=True):
        kind = part_of(" ".join(process.cmdline())) or "ray"
        found[kind] = found.get(kind, 0.0) + _cpu_s(process.pid)
    return found


def _cpu_s(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def _none() -> Any:
    raise AssertionError("learner and workers are simulated")


@contextmanager
def _ray() -> Iterator[None]:
    try:
        start_ray(load_run_config(None).cluster)
        yield
    finally:
        stop_ray()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="64,256,1000")
    parser.add_argument("--depth", type=int, default=1, help="pipeline_depth, 1 to 3")
    parser.add_argument("--tokens", type=int, default=250, help="sampled tokens of a trajectory")
    parser.add_argument("--rate", type=float, default=600.0, help="groups per second that the learner takes")
    parser.add_argument("--seconds", type=float, default=30.0, help="of measuring, with each number of workers")
    parser.add_argument("--hosts", type=int, default=2, help="processes for the workers")
    parser.add_argument("--adapter-mib", type=float, default=0.0, help="what an adapter has more than 16 KiB")
    options = parser.parse_args(arguments)
    print(f"load average {' '.join(f'{one:.1f}' for one in os.getloadavg())} before, {os.cpu_count()} cores\n{HEADER}")
    for workers in map(int, options.workers.split(",")):
        measured = measure(workers, options)
        print(measured.row(), *measured.verdicts(), sep="\n", flush=True)


if __name__ == "__main__":
    main()
