"""A run whose worker and learner are simulated. Its loop runs in a thread while the test kills its processes."""

import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from rich.console import Console as RichConsole

from actors.cluster import start_ray
from actors.launch import Builders
from configs.loading import load_run_config
from configs.run import ClusterConfig, RunConfig
from learner.checkpoint import newest_checkpoint
from ray_jobs.cold_start import cold_start
from ray_jobs.run.console import Console
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.run import Run, start_parts
from ray_jobs.train import reinforce
from rollout.files import read_records
from tests.faults.audit import faults_of, steps_of
from tests.faults.job import PARTS, part_of
from tests.simulated_parts import SimulatedLearner, SimulatedWorker, trained_counts

ROOT = Path(__file__).parents[2]
WAIT_S = 300.0
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
    """Let processes that are started meanwhile import the doubles of these tests."""
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
    """Start Ray as a run does on a machine with this many cores, instead of one that is up."""
    ray.shutdown()
    cpu_count, os.cpu_count = os.cpu_count, lambda: num_cpus
    with doubles_found():
        try:
            start_ray(ClusterConfig())
            yield
        finally:
            ray.shutdown()
            os.cpu_count = cpu_count


def make_config(folder: Path, *overrides: str) -> RunConfig:
    return load_run_config(None, [*SMALL, f"output_dir={folder}", "name=r", *overrides])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run after its cold start, and the text on its console."""

    run: Run
    console: io.StringIO

    @property
    def folder(self) -> Path:
        return self.run.folder.path

    @property
    def said(self) -> str:
        return self.console.getvalue()

    def reinforce(self) -> "Future[Any]":
        """Start the RL phase in a thread."""
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(reinforce(self.run))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return done

    def finish(self, training: "Future[Any]") -> Any:
        """Return the facts of the RL phase, once it has ended. Raises what it raises."""
        try:
            return training.result(WAIT_S)
        except TimeoutError:
            raise AssertionError(f"it does not end, at step {len(steps_of(self.folder))}: {self.said}") from None


@contextmanager
def open_stage(
    config: RunConfig,
    *,
    build_worker: Callable[..., Any] = SimulatedWorker,
    build_learner: Callable[..., Any] = SimulatedLearner,
    build_base: Callable[[], Any] | None = None,
) -> Iterator[Stage]:
    """Start the actors of a run, up to the end of its cold start; none of them is left afterwards."""
    console = io.StringIO()
    builders = Builders(learner=build_learner, worker=build_worker, base=build_base)
    with RunFolder.open(config, with_prm=False) as folder:
        try:
            with start_parts(config, folder, Console(RichConsole(file=console)), builders) as run:
                cold_start(run)
                yield Stage(run=run, console=console)
        finally:
            end_actors()


def end_actors() -> None:
    """Kill all actors, and wait until their processes and names are gone: the next test uses the same names."""
    for name in ray.util.list_named_actors():
        with suppress(ValueError):
            ray.kill(ray.get_actor(name))
    wait_until(lambda: not any(map(processes, PARTS)) and not ray.util.list_named_actors())


def processes(part: str) -> list[psutil.Process]:
    """Return the processes of a part, among the descendants of this one."""
    return [process for process in psutil.Process().children(recursive=True) if part_of(process) == part]


def kill(part: str) -> list[int]:
    """Kill every process of a part with SIGKILL; return their ids."""
    victims = processes(part)
    assert victims, f"no {part} is alive"
    for process in victims:
        process.kill()
    wait_until(lambda: not any(process.is_running() for process in victims))
    return [process.pid for process in victims]


def wait_until(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Return the value of the condition once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"nothing happened within {timeout_s:.0f} s"
        time.sleep(0.05)
    return value


def trained_once(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the trained groups. Fails unless the newest weights were trained once on exactly these."""
    rows = [row for row in read_records(folder / "groups.jsonl") if row["state"] == "trained"]
    checkpoint, _ = newest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    weights = (checkpoint.folder / "adapter.safetensors").read_bytes()
    assert trained_counts(weights) == {int(row["id"][1:]): 1 for row in rows}
    return rows


def check_law(folder: Path, facts: Any) -> dict[str, int]:
    """Check what holds after any run, whatever was killed; return the counts of groups.

    Every group has one end, every step happened once, and the weights of the newest checkpoint were trained once on
    every trained group and on no other.
    """
    groups: dict[str, int] = facts["groups"]
    assert faults_of(folder, groups) == []
    trained_once(folder)
    return groups
