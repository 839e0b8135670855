"""Train steps of two checkouts in turns, as ratios: other work on the machine slows both.

    git worktree add ../old COMMIT
    python -m benchmarks.learner_pairs ../old [--pairs 10]

Both compute one group of four siblings of `learner_efficiency` with the demo model and their own recipe; what is
printed is this checkout's seconds and processor seconds by the other's. An old checkout's guard may refuse the made-up
samples: it then leaves the optimizer's step out, which is in its favour.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

HERE = Path(__file__).parents[1]
STEPS = """
import os, sys, time
sys.path.insert(0, os.getcwd())
import torch
from benchmarks import learner_efficiency as benchmark
torch.set_num_threads(os.cpu_count())
config = benchmark.load_run_config(benchmark.DEFAULT_RECIPE)
if hasattr(benchmark, "unguarded_learner"):
    learner = benchmark.unguarded_learner(config)
else:
    learner = benchmark.Learner(benchmark.resolve_model(config.model.path), config.model, config.learner, seed=0)
samples = benchmark.sibling_samples(benchmark.ChatFormat(learner.policy.tokenizer), group_size=4, num_groups=1)
batch = benchmark.build_batch(samples, microbatch_tokens=config.learner.microbatch_tokens)
for _ in sys.stdin:
    busy = time.process_time()
    metrics = learner.train_step(batch).metrics
    print(metrics["learner/step_s"], time.process_time() - busy, metrics["policy/loss"], flush=True)
"""


class Steps:
    """A process that takes a step of its checkout whenever it is asked."""

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", STEPS], cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take(self) -> tuple[float, float, float]:
        """Seconds, processor seconds, loss."""
        assert self._process.stdin
        assert self._process.stdout
        print("step", file=self._process.stdin, flush=True)
        seconds, busy, loss = map(float, self._process.stdout.readline().split())
        return seconds, busy, loss

    def close(self) -> None:
        self._process.communicate()


def show(name: str, ratios: Sequence[float]) -> None:
    low, _, high = quantiles(ratios, n=4)
    print(f"{name}: {median(ratios):.2f} of the other's (quartiles {low:.2f} and {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of another checkout")
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    from ray_jobs.run.resources import training_env

    os.environ |= training_env(os.cpu_count() or 1, "cpu")
    own, other = Steps(HERE), Steps(options.other)
    first = own.take()[2], other.take()[2]
    print(f"loss of the first step: {first[0]!r}, the other's {first[1]!r}")
    pairs = []
    for number in range(options.pairs):
        if number % 2:
            pairs.append((own.take(), other.take()))
        else:
            theirs = other.take()
            pairs.append((own.take(), theirs))
    own.close()
    other.close()
    show("seconds", [one[0] / two[0] for one, two in pairs])
    show("processor seconds", [one[1] / two[1] for one, two in pairs])


if __name__ == "__main__":
    main()
