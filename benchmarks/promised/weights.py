"""What is promised of the proof of an engine's weights, and of random streams."""

import tempfile
from pathlib import Path

import torch

from benchmarks.promised.promise import Measured, Promise
from envs.datasets.generated import sample_tasks
from rollout.engines.wrappers import demonstrated_plans, engine_seed
from tests.rollout.simulated_memory import MergedMemory, adapter_versions, read_native, save_base

STEP_SIZES = (1e-6, 1e-5, 1e-4, 1e-3)
VERSIONS = 12


def measure_proof(seed: int) -> Measured:
    """Every earlier version in the place of every later one, in the memory of an engine."""
    wrong, passed_memory = _memory(seed)
    return Measured(
        f"memory: {passed_memory} of {wrong} earlier versions passed as a later one", holds=not passed_memory
    )


def measure_seeds(seed: int) -> Measured:
    """The streams of the engines of many runs, and what their demonstrations get wrong."""
    runs = range(seed, seed + 256)
    streams = [engine_seed(run, worker) for run in runs for worker in range(64)]
    shared = len(streams) - len(set(streams))
    tasks = sample_tasks({"lookup": 1.0}, split="train", count=200, seed=0)
    kinds = [[len(plan) == 1 for plan in demonstrated_plans(tasks, 1.0, seed=run)] for run in runs[:8]]
    agreed = [sum(mine == theirs for mine, theirs in zip(kinds[0], other, strict=True)) for other in kinds[1:]]
    return Measured(
        f"{shared} of {len(streams)} engine streams shared; two runs make the same mistake in {max(agreed)} of 200 "
        "places at most, 149 by chance",
        holds=shared == 0 and max(agreed) < 180,
    )


PROMISES = [
    Promise(
        name="weight-proof",
        said="No earlier version passes as the newest at any step size, restarted workers included",
        where="docs/engine-room.md",
        measure=measure_proof,
    ),
    Promise(
        name="seeds",
        said="Runs with different seeds share no random stream",
        where="docs/engine-room.md",
        measure=measure_seeds,
    ),
]


def _memory(seed: int) -> tuple[int, int]:
    """Wrong weights in merged and native memories, of an old engine and a restarted one: how many, and how many of them
    passed. A healthy memory that is refused counts as passed."""
    wrong = passed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generator = torch.Generator().manual_seed(seed)
        merger = save_base(folder, generator)
        for step_size in STEP_SIZES:
            *earlier, newest = adapter_versions(generator, step_size=step_size, count=VERSIONS)
            old = MergedMemory(merger)
            for version in earlier:
                passed += old.load(version).fault is not None
            for held in earlier:
                found = [
                    *(memory.load(newest, held=held) for memory in (old, MergedMemory(merger))),
                    read_native(folder / "slots", newest, held),
                ]
                wrong += len(found)
                passed += sum(one.fault is None for one in found)
            passed += read_native(folder / "slots", newest, newest).fault is not None
    return wrong, passed
