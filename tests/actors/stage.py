"""A run whose worker and learner are simulated. Its loop goes on in a thread while the test kills its processes."""

import io
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from rich.console import Console as RichConsole

from actors.cluster import start_ray, stop_ray
from configs.cluster import ClusterConfig
from configs.loading import load_run_config
from configs.run import RunConfig
from ray_jobs.phases.cold_start import cold_start
from ray_jobs.run.actors import RunActors
from ray_jobs.run.console import Console
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.run import Run
from ray_jobs.run.watch import Watch
from ray_jobs.train import reinforce
from rollout.records import read_records
from rollout.store.adapters import AdapterStore
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupCounts
from tests.faults.job import PARTS, part_of
from tests.simulated_parts import SimulatedLearner, SimulatedWorker, trained_counts

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
"""A loaded machine takes long to start processes."""

SMALL = (
    "num_steps=5",
    "batch_groups=2",
    "pipeline_depth=2",
    "max_staleness=1000",
    "max_empty_batches=1000",
    "envs.mix={lookup = 1.0}",
    "rollout.group_size=4",
    "rollout.engine.max_num_seqs=8",
    "learner.checkpoint_every=2",
    "learner.keep_checkpoints=2",
    "learner.num_threads=1",
    "cold_start.num_demonstrations=0",
)
"""Four groups run at a time on each worker."""


@contextmanager
def doubles_found() -> Iterator[None]:
    """Processes that are started meanwhile find the doubles of these tests."""
    before = os.environ.get("PYTHONPATH")
    rooms = (ROOT / "tests" / room for room in ("actors", "rollout", "learner"))
    os.environ["PYTHONPATH"] = ":".join(map(str, (ROOT, *rooms)))
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


@contextmanager
def local_ray(num_cpus: int = 4) -> Iterator[None]:
    """Ray as a run starts it on a machine with so many cores, in the place of one that is up."""
    stop_ray()
    cpu_count, os.cpu_count = os.cpu_count, lambda: num_cpus
    with doubles_found():
        try:
            start_ray(ClusterConfig())
            yield
        finally:
            stop_ray()
            os.cpu_count = cpu_count


def make_config(folder: Path, *overrides: str) -> RunConfig:
    return load_run_config(None, [*SMALL, f"output_dir={folder}", "name=r", *overrides])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run after its cold start, and what it said on its console."""

    run: Run
    console: io.StringIO

    @property
    def folder(self) -> Path:
        return self.run.folder.path

    @property
    def said(self) -> str:
        return self.console.getvalue()

    def reinforce(self) -> "Future[Any]":
        """The RL phase, begun in a thread of its own."""
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(reinforce(self.run))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return done

    def finish(self, training: "Future[Any]") -> Any:
        """The facts of the RL phase, once it has ended. Raises what it raises."""
        try:
            return training.result(PATIENCE_S)
        except TimeoutError:
            states = Counter(row["state"] for row in self.groups())
            raise AssertionError(
                f"it goes on and on, at step {len(steps_of(self.folder))}, {states}: {self.said}"
            ) from None

    def groups(self, *states: str) -> list[sqlite3.Row]:
        return groups_of(self.folder, *states)


@contextmanager
def open_stage(
    config: RunConfig,
    *,
    build_worker: Callable[..., Any] = SimulatedWorker,
    build_learner: Callable[..., Any] = SimulatedLearner,
    build_base: Callable[[], Any] | None = None,
) -> Iterator[Stage]:
    """The actors of a run, up and in step with its newest version; none of them is left afterwards."""
    console = io.StringIO()
    with RunFolder.open(config, with_prm=False) as folder:
        said = Console(RichConsole(file=console))
        watch = Watch(
            config.liveness,
            resume=f"`agentflow resume {folder.path}`",
            note=said.note,
            deaths_before=folder.num_restarts(),
            counted=folder.keep_num_restarts,
        )
        said.late = watch.late
        actors = RunActors(
            config,
            folder,
            build_learner=build_learner,
            build_worker=build_worker,
            build_base=build_base,
            watch=watch,
        )
        try:
            with watch:
                for index in range(config.rollout.num_workers):
                    actors.start_worker(index)
                actors.wait_until_ready()
                run = Run(config=config, console=said, folder=folder, actors=actors)
                cold_start(run)
                yield Stage(run=run, console=console)
        finally:
            dismiss(actors)


def dismiss(actors: RunActors) -> None:
    """End all actors; the next test looks for its own by the names of their processes."""
    for index in actors.worker_indices:
        actors.stop_worker(index)
    for actor in (actors.learner, actors.store, *([actors.base] if actors.base else [])):
        ray.kill(actor)
    actors.release()
    wait_until(lambda: not any(map(processes, PARTS)))


def processes(part: str) -> list[psutil.Process]:
    """The processes of an actor, among the descendants of this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if part_of(" ".join(process.cmdline())) == part:
                found.append(process)
    return found


def kill(part: str) -> list[int]:
    """SIGKILL every process of an actor; returns their ids."""
    victims = processes(part)
    assert victims, f"no {part} is alive"
    for process in victims:
        process.kill()
    wait_until(lambda: not any(process.is_running() for process in victims))
    return [process.pid for process in victims]


def wait_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """What the condition says once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"nothing happened within {timeout_s:.0f} s"
        time.sleep(0.05)
    return value


def groups_of(folder: Path, *states: str) -> list[sqlite3.Row]:
    """The ledger's rows in the order of drawing, those in one of these states where some are given."""
    connection = sqlite3.connect(f"file:{folder}/ledger.sqlite?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    try:
        rows = connection.execute(
            "SELECT ordinal, task, family, state, attempt, worker, step, reason, versions FROM groups"
        ).fetchall()
    finally:
        connection.close()
    return [row for row in rows if not states or row["state"] in states]


def steps_of(folder: Path) -> list[int]:
    """The train steps in metrics.jsonl."""
    return [row["step"] for row in read_records(folder / "metrics.jsonl") if "policy/loss" in row]


def versions_of(folder: Path) -> list[int]:
    """The versions that were ever published."""
    return [row["policy_version"] for row in read_records(folder / "adapters" / "index.jsonl")]


def begun_with_again(folder: Path) -> set[int]:
    """The versions under which the policy that RL began with was published again, as each resume does."""
    rows = list(read_records(folder / "adapters" / "index.jsonl"))
    return {row["policy_version"] for row in rows[1:] if row["digest"] == rows[0]["digest"]}


def check_nothing_lost(folder: Path) -> GroupCounts:
    """Everything that holds after any run, whatever was killed; returns where the groups are.

    The strongest of it: the weights of the newest version were trained once on every group that the ledger calls
    trained, and on no other.
    """
    counts = Ledger(folder / "ledger.sqlite").verify()
    steps, versions = steps_of(folder), versions_of(folder)
    assert steps == list(range(1, len(steps) + 1))
    assert versions == sorted(set(versions))
    adapters = AdapterStore(folder / "adapters")
    trained = [row["ordinal"] for row in groups_of(folder, "trained")]
    assert trained_counts(adapters.read(adapters.newest)) == dict.fromkeys(trained, 1)
    return counts


def tasks_of(rows: Sequence[sqlite3.Row]) -> Counter[int]:
    return Counter(row["task"] for row in rows)
