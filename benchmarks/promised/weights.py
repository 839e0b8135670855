"""What is promised of the proof of an engine's weights, and of random streams."""

import math
import random
import tempfile
from pathlib import Path

import torch

from benchmarks.promised.promise import Measured, Promise
from envs.datasets.generated import sample_tasks
from rollout.engines.wrappers import demonstrated_plans, engine_seed
from rollout.store.canary import CanaryScores, canary_fault, moved
from tests.rollout.simulated_memory import MergedMemory, adapter_versions, read_native, save_base

STEP_SIZES = (1e-6, 1e-5, 1e-4, 1e-3)
VERSIONS = 12
CANARY_VERSIONS = 100
NUM_TOKENS = 75
LEARNER_ROUNDING, ENGINE_ROUNDING = 0.07, 0.08
"""Of a token's log-prob, in nats, at random at every version: together the largest gap that was measured between the
demo model's learner and engine."""
MOVE_OF_STEP = 1.7e3
"""By how much one version at step size 1 moves the text: the demo run's, taken as a straight line."""
TELLABLE = 6.0
"""From this distance on the text alone must tell two versions apart: seven times what rounding moves it by."""


def measure_proof(seed: int) -> Measured:
    """Every earlier version in the place of every later one, in the memory and in the answers of an engine."""
    wrong, passed_memory = _memory(seed)
    tried, passed_text, refused, healthy = 0, 0, 0, 0
    for step_size in STEP_SIZES:
        found = _text(step_size, seed)
        tried, passed_text = tried + found[0], passed_text + found[1]
        healthy, refused = healthy + found[2], refused + found[3]
    text = (
        f"memory: {passed_memory} of {wrong} earlier versions passed as a later one; text: {passed_text} of {tried} "
        f"that rounding cannot hide; {refused} of {healthy} healthy readings refused"
    )
    return Measured(text, holds=not (passed_memory or passed_text or refused))


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


def _text(step_size: float, seed: int) -> tuple[int, int, int, int]:
    """Wrong engines that the text must tell, and how many passed; healthy readings, and how many were refused."""
    rng = random.Random(f"{seed}|{step_size}")
    way = [rng.gauss(0, 1) for _ in range(NUM_TOKENS)]
    start = [rng.uniform(-12, 0) for _ in way]
    step = MOVE_OF_STEP * step_size / math.hypot(*way)

    def said(version: int, rounding: float) -> list[float]:
        return [one + version * step * part + rng.gauss(0, rounding) for one, part in zip(start, way, strict=True)]

    learner = {version: said(version, LEARNER_ROUNDING) for version in range(-1, CANARY_VERSIONS)}

    def scores(version: int, served: int) -> CanaryScores:
        return CanaryScores(policy_version=version, learner=learner[version], engine=said(served, ENGINE_ROUNDING))

    tried = passed = refused = healthy = 0
    base = proven = scores(-1, -1)
    for version in range(CANARY_VERSIONS):
        published = {one: learner[one] for one in range(-1, version + 1)}
        now = scores(version, version)
        for before in ([base, proven], [scores(-1, -1)]):
            healthy += 1
            refused += canary_fault(now, before, published) is not None
        proven = now if moved(now, proven) else proven
        for served in _earlier(version, rng):
            if (version - served) * MOVE_OF_STEP * step_size >= TELLABLE:
                tried += 1
                passed += canary_fault(scores(version, served), [scores(-1, -1)], published) is None
    return tried, passed, healthy, refused


def _earlier(version: int, rng: random.Random) -> list[int]:
    return rng.sample(range(-1, version), min(5, version + 1))
