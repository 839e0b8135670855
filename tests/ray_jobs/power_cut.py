"""Cut the power of a run at random points, resume it each time, and see whether weights were trained twice on a group.

The run is the real one but for its engine and model, in one process: loop, store, ledger, run folder and checkpoints
are those of `agentflow train`; `DurableDisk` decides what each cut leaves.

    python -m tests.ray_jobs.power_cut --cuts 20 --seed 1
"""

import argparse
import asyncio
import io
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO
from unittest import mock

import ray
from rich.console import Console as RichConsole

from actors.learner import LearnerCalls
from actors.store import StoreActor
from configs.loading import load_run_config
from configs.run import RunConfig
from envs.datasets.sampler import TaskSampler
from ray_jobs.phases.cold_start import cold_start
from ray_jobs.run.actors import RunActors
from ray_jobs.run.console import Console
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.run import Run
from ray_jobs.train import continue_training, train_step
from reward.judging import GroupJudge, OutcomeReward, group_result
from rollout.store.admission import WorkerStatus
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupCounts, group_id
from tests.ray_jobs.durable_disk import DurableDisk, PowerCutError
from tests.simulated_parts import GroupShape, LognormalTasks, SimulatedLearner, SimulatedWorker, trained_counts

SHAPE = GroupShape(tasks=LognormalTasks(median_s=0.0, sigma=0.0), num_turns=2, turn_tokens=8)
MOMENTS_BETWEEN = 160
"""A cut comes at one of so many moments after a start; a train step with its checkpoint has some 50."""


class TrainedTwiceError(AssertionError):
    """Weights that live on were trained on a group twice, or on one that the ledger does not call trained."""


class InProcess:
    """An object with the calls of an actor's handle. Each is made at once; what it returns takes the place of Ray's
    reference."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.target = target
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            result = getattr(self.target, name)(*arguments, **options)
            return self._loop.run_until_complete(result) if asyncio.iscoroutine(result) else result

        return SimpleNamespace(remote=call)


class Learner(LearnerCalls):
    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._learner = SimulatedLearner()  # type: ignore[assignment]


class Parts:
    """The actors of a run, in this process; one worker rolls out when it is told to."""

    prm = None
    uses_prm = False
    publish_anew = RunActors.publish_anew
    newest_version = RunActors.newest_version

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._config = config
        self._worker = SimulatedWorker(0, SHAPE)
        self._judge = GroupJudge(OutcomeReward(config.learner, max_turn_tokens=config.rollout.max_turn_tokens))
        self._tasks = TaskSampler(config.envs.mix, seed=config.seed)
        self._first_version: int | None = None
        self.store = InProcess(StoreActor.__ray_metadata__.modified_class(config, folder), self._loop)
        self.learner = InProcess(Learner(config), self._loop)
        self.workers = (InProcess(self._worker, self._loop),)

    def ask_learner(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return getattr(self.learner, method.__name__).remote(*arguments)

    def sync_weights(self) -> None:
        """The worker is always believed."""

    def roll_out(self, num_groups: int) -> None:
        """So many groups come to an end; another one begins and does not. They are sampled with the oldest weights that
        they may begin with, but never with any that were published before this life began: no worker has these."""
        version = self.newest_version()
        self._first_version = version if self._first_version is None else self._first_version
        store = self.store.target
        self._loop.run_until_complete(store._buffer.prove(0, version))
        running: tuple[Any, ...] = ()
        for _ in range(num_groups + 1):
            status = WorkerStatus(worker=0, policy_version=version, running=running, free_places=1)
            for permit in self._loop.run_until_complete(store._buffer.admit(status, patience_s=0.0)).permits:
                running = (*running, permit.lease)
                if len(running) <= num_groups:
                    self._loop.run_until_complete(self._complete(permit))

    async def _complete(self, permit: Any) -> None:
        assert self._first_version is not None
        oldest = self.store.target._buffer._admitter.min_version
        self._worker.engine.policy_version = max(oldest, self._first_version)
        task, name = self._tasks.task(permit.task, permit.family), group_id(permit.ordinal)
        group = await self._worker.run_group(task, name, self._config.rollout.group_size)
        result = group_result(await self._judge.judge(group), duration_s=0.0)
        await self.store.target.complete([(permit.lease, result)])

    def end(self) -> None:
        """As when the process ends; what it had begun in a thread is waited for."""
        self._loop.run_until_complete(
            asyncio.wait({self._loop.create_task(asyncio.sleep(0)), *asyncio.all_tasks(self._loop)})
        )
        self.store.target._ledger.close()
        self._loop.close()


class Rollouts:
    """What the loop asks of the supervisor."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def get(self, value: Any, what: str) -> Any:
        return value

    def learn(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return getattr(self._parts.learner, method.__name__).remote(*arguments, **options)

    def readings(self) -> list[Any]:
        return []

    def progressed(self) -> None:
        """Nobody counts deaths."""


def make_config(folder: Path, *overrides: str) -> RunConfig:
    settings = ("num_steps=12", "batch_groups=2", "pipeline_depth=2", "max_staleness=1000", "max_empty_batches=1000")
    mix = ("envs.mix={lookup = 1.0}", "rollout.group_size=2", "cold_start.num_demonstrations=0")
    kept = ("learner.checkpoint_every=2", "learner.keep_checkpoints=2", "learner.num_threads=1")
    return load_run_config(None, [*settings, *mix, *kept, *overrides, f"output_dir={folder}", "name=r"])


def go_on(config: RunConfig, said: TextIO) -> None:
    """Begin or resume the run and bring it to its end, as `agentflow train` and `resume` do. `said`: its console.
    Raises TrainedTwiceError."""
    console = Console(RichConsole(file=said, width=10_000))
    with (
        mock.patch.object(ray, "get", lambda value, **_: value),
        mock.patch.object(ray, "put", lambda value: value),
        RunFolder.open(config, with_prm=False, tell=console.note) as folder,
    ):
        parts = Parts(config, folder.path)
        try:
            run = Run(config=config, console=console, folder=folder, actors=parts)  # type: ignore[arg-type]
            cold_start(run)
            training = continue_training(run)
            parts.store.begin_again.remote()
            check(parts)
            while training.num_steps < config.num_steps:
                parts.roll_out(2 * config.batch_groups)
                train_step(run, training, Rollouts(parts))  # type: ignore[arg-type]
            check(parts)
        finally:
            parts.end()


def check(parts: Parts) -> GroupCounts:
    """The weights were trained once on every group that the ledger calls trained, and on no other."""
    ledger: Ledger = parts.store.target._ledger
    listed = [ordinal for one in ledger.trained_groups().steps for ordinal, _ in one.groups]
    found = trained_counts(parts.learner.target._learner.adapter().data)
    if found != dict.fromkeys(listed, 1):
        raise TrainedTwiceError(f"trained by the weights: {found}, by the ledger: {sorted(listed)}")
    return ledger.verify()


def cut_again_and_again(place: Path, cuts: int, seed: int, *overrides: str) -> str:
    """Begin a run in `place`, cut its power so many times, and let it end; returns what it said. Each life has a folder
    of its own."""
    rng, said = random.Random(f"power cut|{seed}"), io.StringIO()
    folder = place / "life-0"
    folder.mkdir()
    for life in range(cuts):
        into = place / f"life-{life + 1}"
        disk = DurableDisk(root=folder, into=into, rng=rng, cut_at=rng.randint(1, MOMENTS_BETWEEN))
        try:
            with disk.watched():
                go_on(make_config(folder, *overrides), said)
            break
        except PowerCutError:
            folder = into
    go_on(make_config(folder, *overrides), said)
    return said.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        said = cut_again_and_again(Path(place), options.cuts, options.seed, f"num_steps={4 * options.cuts}")
        told = [line.strip() for line in said.splitlines() if "lost" in line or "passed over" in line]
        num_lives = len(list(Path(place).iterdir()))
        print(json.dumps({"cuts": num_lives - 1, "trained_twice": 0, "told": told}, indent=2))


if __name__ == "__main__":
    main()
