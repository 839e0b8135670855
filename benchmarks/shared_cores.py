"""What engine and learner lose to each other on the same cores, by who goes first, how long waiting threads spin, and
how many threads each has.

    python -m benchmarks.shared_cores [--repeats 3] [--seconds 20] [--arms WORD ...]

Two processes as a run has them, each with as many threads as there are cores where its arm says nothing else: an engine
that plays 24 trajectories of the demo at a time, and a learner that trains on one group again and again. Each works
alone, then both together, in every arm, and the arms take turns. Told are medians of tokens per second, and `together`:
the sum of what each does beside the other as a share of the best that it does alone. Two programs that take turns
without any loss come to 1.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from ray_jobs.run.resources import thread_env, training_env

PLACES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`nice`: by how much the learner goes before the engine; `spins`: how often a waiting thread looks before it
    sleeps, None for what OpenMP chooses; threads of each, None for as many as there are cores."""

    name: str
    nice: int = 0
    spins: int | None = 1000
    engine_threads: int | None = None
    learner_threads: int | None = None


ARMS = (
    Arm(name="equals, short spins"),
    Arm(name="equals, long spins", spins=None),
    Arm(name="learner first, short spins", nice=10),
    Arm(name="learner first, long spins", nice=10, spins=None),
    Arm(name="engine of one thread", engine_threads=1),
    Arm(name="learner of one thread", learner_threads=1),
    Arm(name="one thread each", engine_threads=1, learner_threads=1),
)


class Part:
    """A process that computes on demand."""

    def __init__(self, kind: str, arm: Arm) -> None:
        num_threads = getattr(arm, f"{kind}_threads") or os.cpu_count() or 1
        environment = training_env(num_threads, "cpu") if kind == "learner" else thread_env(num_threads)
        environment.pop("GOMP_SPINCOUNT", None)
        if arm.spins is not None:
            environment["GOMP_SPINCOUNT"] = str(arm.spins)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--part", kind, "--nice", str(arm.nice)],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said()

    def ask(self, seconds: float) -> None:
        assert self._process.stdin
        print(seconds, file=self._process.stdin, flush=True)

    def said(self) -> float:
        """Tokens per second of the time that it was asked for."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("rate "):
                return float(line.split()[1])
        raise RuntimeError(f"a part of the benchmark ended with exit code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def measured(arm: Arm, seconds: float) -> dict[str, float]:
    engine, learner = Part("engine", arm), Part("learner", arm)
    rates = {}
    for name, parts in {"engine": [engine], "learner": [learner], "both": [engine, learner]}.items():
        for part in parts:
            part.ask(seconds)
        rates |= {f"{name}-{'learner' if part is learner else 'engine'}": part.said() for part in parts}
    engine.close()
    learner.close()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--arms", nargs="+", default=[""], metavar="WORD", help="those with one of these in the name")
    parser.add_argument("--part", choices=["engine", "learner"], help=argparse.SUPPRESS)
    parser.add_argument("--nice", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        play(options.nice) if options.part == "engine" else learn()
        return
    arms = [arm for arm in ARMS if any(word in arm.name for word in options.arms)]
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for repeat in range(options.repeats):
        for arm in (*arms[repeat % len(arms) :], *arms[: repeat % len(arms)]):
            found[arm.name].append(measured(arm, options.seconds))
            print(arm.name, {name: round(rate, 1) for name, rate in found[arm.name][-1].items()}, flush=True)
    print(table({name: medians(rows) for name, rows in found.items()}))


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def table(arms: dict[str, dict[str, float]]) -> str:
    best = {part: max(row[f"{part}-{part}"] for row in arms.values()) for part in ("engine", "learner")}
    lines = ["arm | engine alone | learner alone | engine beside learner | learner beside engine | together"]
    for name, row in arms.items():
        together = sum(row[f"both-{part}"] / best[part] for part in best)
        rates = (row[key] for key in ("engine-engine", "learner-learner", "both-engine", "both-learner"))
        lines.append(" | ".join([name, *(f"{rate:.0f}" for rate in rates), f"{together:.2f}"]))
    return "\n".join(lines)


# --- the parts, each in its process ------------------------------------------------------------------


def play(nice: int) -> None:
    from configs.loading import load_run_config
    from envs.datasets.sampler import TaskSampler
    from ray_jobs.cli_options import DEFAULT_RECIPE
    from ray_jobs.run.model_folder import resolve_model
    from rollout.worker import Worker

    os.nice(nice)
    config = load_run_config(DEFAULT_RECIPE)
    worker = Worker(config, resolve_model(config.model.path), index=0)
    agent = worker._build_agent(worker.engine, temperature=1.0)
    sampler = TaskSampler(config.envs.mix, seed=1)

    async def for_so_long(seconds: float) -> float:
        """Tokens that were computed, of prompts too where they were not cached."""

        async def keep_playing(place: int) -> None:
            for number in range(10**6):
                await agent.run(
                    sampler.task(place + PLACES * number), trajectory_id=f"{place}/{number}", group_id="benchmark"
                )

        playing = [asyncio.create_task(keep_playing(place)) for place in range(PLACES)]
        before = worker.engine.load.computed_tokens
        await asyncio.sleep(seconds)
        rate = (worker.engine.load.computed_tokens - before) / seconds
        for one in playing:
            one.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        return rate

    asyncio.run(for_so_long(5))
    answer(lambda seconds: asyncio.run(for_so_long(seconds)))
    worker.close()


def learn() -> None:
    from learner_efficiency import sibling_samples, unguarded_learner

    from configs.loading import load_run_config
    from learner.packing import build_batch, pack
    from ray_jobs.cli_options import DEFAULT_RECIPE
    from rollout.chat import ChatFormat

    config = load_run_config(DEFAULT_RECIPE)
    learner = unguarded_learner(config)
    samples = sibling_samples(ChatFormat(learner.policy.tokenizer), group_size=4, num_groups=1)
    batch = build_batch(samples, microbatch_tokens=config.learner.microbatch_tokens)
    num_tokens = sum(len(pack(rows).token_ids) for rows in batch.microbatches)
    learner.train_step(batch)

    def for_so_long(seconds: float) -> float:
        started, steps = time.perf_counter(), 0
        while time.perf_counter() < started + seconds:
            learner.train_step(batch)
            steps += 1
        return steps * num_tokens / (time.perf_counter() - started)

    answer(for_so_long)


def answer(for_so_long: Callable[[float], float]) -> None:
    print("rate 0", flush=True)
    for line in sys.stdin:
        print("rate", for_so_long(float(line)), flush=True)


if __name__ == "__main__":
    main()
