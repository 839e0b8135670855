"""The promises of the README, measured: what is promised, what was measured just now, and whether it holds.

    python -m benchmarks.promises [--seed K] [--only NAME ...]

Each promise is measured in its own process, one after the other; the exit code is 1 if one does not hold. Takes about
ten minutes on two cores.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).parents[1]


class Measured(NamedTuple):
    """The result of a measurement, and whether the promise holds."""

    text: str
    holds: bool


def weights(seed: int) -> Measured:
    """Keep every earlier version in the memory of an engine that is asked to load the newest one."""
    from tests.rollout.simulated_memory import MergedMemory, adapter_versions, read_native, save_base

    passed = wrong = refused = 0
    with tempfile.TemporaryDirectory() as name:
        folder, generator = Path(name), torch.Generator().manual_seed(seed)
        merger = save_base(folder, generator)
        for step_size in (1e-6, 1e-5, 1e-4, 1e-3):
            *earlier, newest = adapter_versions(generator, step_size=step_size, count=12)
            memory = MergedMemory(merger)
            refused += sum(memory.load(version).fault is not None for version in (*earlier, newest))
            refused += read_native(folder / "slots", newest, newest).fault is not None
            for held in earlier:
                reads = (memory.load(newest, held=held), MergedMemory(merger).load(newest, held=held))
                reads += (read_native(folder / "slots", newest, held),)
                wrong += len(reads)
                passed += sum(read.fault is None for read in reads)
    text = f"{passed} of {wrong} memories with an earlier version passed as the newest; {refused} correct ones refused"
    return Measured(text, holds=not passed and not refused)


def gradients(seed: int) -> Measured:
    """Compare the gradient of tokens of every confidence, through a bfloat16 head, with float64."""
    from learner.policy import TokenLogprobs

    bands = ((0.5, 0.98), (0.98, 0.998), (0.998, 0.9999), (0.9999, 1.0))
    generator = torch.Generator().manual_seed(seed)
    head = (torch.randn(4096, 576, generator=generator) * 0.05).bfloat16()
    tokens = torch.randint(len(head), (512,), generator=generator)
    contexts, rows = torch.arange(len(tokens)), head[tokens].float()
    pull = torch.linspace(5, 22, len(tokens))[:, None] * rows / rows.norm(dim=1, keepdim=True) ** 2
    hidden = (torch.randn(pull.shape, generator=generator) + pull).bfloat16().requires_grad_()
    TokenLogprobs.apply(hidden, head, torch.ones(len(tokens)), lambda *_: None, contexts, tokens, 64).sum().backward()
    probabilities = (hidden.detach().double() @ head.double().T).softmax(1)
    true = head[tokens].double() - probabilities @ head.double()
    errors, chosen = (hidden.grad.double() - true).norm(dim=1) / true.norm(dim=1), probabilities[contexts, tokens]
    largest = [errors[(chosen >= low) & (chosen < high)].max().item() for low, high in bands]
    shown = ", ".join(f"p from {low:g}: {value:.3f}" for (low, _), value in zip(bands, largest, strict=True))
    # A bfloat16 logit of 22 has an error of up to 0.0625, and 1 - p an error of the same share.
    return Measured(f"largest relative error, {shown}", holds=max(largest) < 0.1)


def planner_tokens(generator: torch.Generator) -> Tensor:
    """Return log-probs like those of a planner's JSON: the grammar decides most tokens."""
    free = torch.rand(32, 100, generator=generator) > 0.85
    return torch.where(free, -3 * torch.rand(32, 100, generator=generator) - 0.05, -1e-5)


def off_policy(seed: int) -> Measured:
    """Offer far and healthy policies to the guard, and measure the gradient that the clip removes."""
    from configs.learner import DEFAULT_BAND, Correction, DapoConfig
    from learner.corrections import off_policy_metrics, off_policy_sums, refusal
    from learner.losses import LossInputs, policy_loss
    from learner.types import TrainBatch

    generator, ones = torch.Generator().manual_seed(seed), torch.ones(32, 100, dtype=torch.bool)

    def is_refused(learner: Tensor, sampler: Tensor) -> bool:
        counts = {"num_loss_tokens": sampler.numel(), "num_trajectories": 32, "num_masked_tokens": 0, "max_age": 2}
        batch = TrainBatch(microbatches=(), **counts)
        metrics = off_policy_metrics(off_policy_sums(learner, sampler, ones, 2 * ones), batch)
        return refusal(metrics | {"loss": 0.0, "grad_norm": 1.0}, batch) is not None

    far, healthy = [], []
    for _ in range(20):
        sampler = planner_tokens(generator)
        free, noise = sampler < -0.01, 0.7 * torch.randn(32, 100, generator=generator)
        far += [is_refused(sampler - 10 * free, sampler), is_refused(planner_tokens(generator), sampler)]
        # A k3 of 0.3 per choice token: the largest step of the demo.
        healthy.append(is_refused(sampler + free * (noise - 0.245), sampler))
    sampler = planner_tokens(generator)
    moved, advantages = (
        sampler + 0.5 * torch.randn(32, 100, generator=generator),
        torch.randn(32, 1, generator=generator),
    )

    def gradient(loss: DapoConfig, correction: Correction) -> Tensor:
        learner = moved.clone().requires_grad_()
        inputs = LossInputs(
            learner_logprobs=learner,
            rollout_logprobs=sampler,
            advantages=advantages,
            loss_mask=ones,
            num_loss_tokens=3200,
            num_trajectories=32,
            correction=correction,
            correction_band=DEFAULT_BAND,
            ages=torch.ones(32, 100, dtype=torch.long),
            turn_ids=torch.zeros(32, 100, dtype=torch.long),
            row_weights=torch.ones(32, 1),
        )
        policy_loss(loss)(inputs).loss.backward()
        return learner.grad

    clipped = []
    for correction in ("tis", "icepop", "none"):
        free, bound = (gradient(loss, correction) for loss in (DapoConfig(clip_low=0.999, clip_high=1e3), DapoConfig()))
        for side in (advantages[:, 0] > 0, advantages[:, 0] < 0):
            clipped.append(float((free - bound)[side].abs().sum() / free[side].abs().sum()))
    text = f"{sum(far)} of {len(far)} far policies refused, {sum(healthy)} of {len(healthy)} healthy ones; "
    text += f"the clip takes {min(clipped):.0%} to {max(clipped):.0%} of the gradient"
    return Measured(text, holds=all(far) and not any(healthy) and min(clipped) > 0)


def splits(seed: int) -> Measured:
    """Count the tasks and questions that two of demonstrations, RL, PRM and evaluation have in common."""
    from configs.loading import load_run_config
    from envs.datasets.rows import question_key
    from envs.datasets.sampler import TaskSampler, cold_start_tasks, collection_tasks, evaluation_tasks

    config = load_run_config(Path("prm_cpu"), [f"seed={seed}"])
    sampler = TaskSampler(config.envs.mix, seed=seed)
    purposes = [
        [generated.task for generated in cold_start_tasks(config)],
        [sampler.task(ordinal) for ordinal in range(10_000)],
        collection_tasks(config.envs.mix, count=config.collect.num_tasks, seed=seed),
        evaluation_tasks(config),
    ]
    names = [{task.id for task in tasks} | {question_key(task.question) for task in tasks} for tasks in purposes]
    shared = sum(len(one & other) for one, other in combinations(names, 2))
    return Measured(f"{shared} shared by two purposes, of {sum(map(len, purposes)):,} tasks", holds=not shared)


def reproduction(seed: int) -> Measured:
    """Train a synchronous recipe twice; kill one of the runs after a train step and resume it."""
    with tempfile.TemporaryDirectory(prefix="agentflow-") as name:
        digests = [run_to_end(Path(name) / kind, seed, kill=kind == "killed") for kind in ("undisturbed", "killed")]
    text = f"adapter {digests[0][:12]} undisturbed, {digests[1][:12]} killed and resumed"
    return Measured(text, holds=digests[0] == digests[1])


def run_to_end(folder: Path, seed: int, *, kill: bool) -> str:
    """Return the digest of the last adapter of a run."""
    command = [sys.executable, "-m", "ray_jobs.cli"]
    settings = [f"name={folder.name}", f"output_dir={folder.parent}", f"seed={seed}", "num_steps=2"]
    train = [*command, "train", "sync_cpu", *settings, "evaluation.num_tasks=2"]
    with folder.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(train, stdout=log, stderr=log, start_new_session=True)
        metrics = folder / "metrics.jsonl"
        while kill and not (metrics.exists() and "policy/loss" in metrics.read_text()):
            if process.poll() is not None:
                raise RuntimeError(f"the run ended before it was killed: {Path(log.name).read_text()[-500:]}")
            time.sleep(0.1)
        if kill:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process = subprocess.Popen([*command, "resume", str(folder)], stdout=log, stderr=log)
        if process.wait() != 0:
            raise RuntimeError(f"the run failed: {Path(log.name).read_text()[-500:]}")
    from learner.checkpoint import checkpoints_in

    *_, newest = checkpoints_in(folder / "checkpoints")
    return str(json.loads((newest / "manifest.json").read_text())["files"]["adapter.safetensors"])


def sandbox(seed: int) -> Measured:
    """Run the corpus of attacks in both tiers, with the import check off, inside namespaces that protect the host."""
    texts, holds = [], True
    for tier in ("namespaces", "landlock"):
        attack = [sys.executable, ROOT / "tests/envs/attack_tier.py", "--tier", tier, "--seed", str(seed)]
        command = [sys.executable, ROOT / "tests/envs/throwaway.py", *attack]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
        if done.returncode:
            return Measured(f"{tier}: {(done.stderr.splitlines() or ['no output'])[-1]}", holds=False)
        found = json.loads(done.stdout)
        texts.append(f"{tier}: {len(found['signs'])} escapes of {found['num_attacks']} attacks")
        holds &= found["tier"] == tier and not found["signs"] and found["num_attacks"] >= 150
    return Measured("; ".join(texts), holds)


def keys(seed: int) -> Measured:
    """Search everything that simulated runs write and answer for API keys that were planted in their environment."""
    test = "tests/ray_jobs/test_planted_keys.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-m", "faults", test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return Measured((done.stdout.splitlines() or ["no output"])[-1], holds=done.returncode == 0)


def viewer(seed: int) -> Measured:
    """Ask the viewer for a run without its token, with a wrong one, and from another origin."""
    from envs.types import Task
    from rollout.codec import trajectory_line
    from rollout.types import Trajectory
    from tests.ray_jobs.browser import viewer as served

    rng = random.Random(seed)
    word = f"word{rng.getrandbits(64):x}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text("{}")
        task = Task(id=word, dataset="lookup", question=word, answer="1")
        attempt = Trajectory(id=f"{word}/0", group_id=word, task=task, turns=(), answer="1", stop_reason="answered")
        (folder / "trajectories.jsonl").write_bytes(trajectory_line(attempt))
        with served(folder) as address:
            base, _, token = address.partition("?token=")
            wrong = "".join(rng.sample(token, len(token)))
            origin = {"Origin": "http://127.0.0.1:1", "Authorization": f"Bearer {token}"}
            headers = [{}, {"Authorization": f"Bearer {wrong}"}, {"Cookie": f"token={token}"}, origin]
            paths = ["", "api/state", "api/about", "api/metrics", "api/trajectories", f"api/trajectory?id={word}/0"]
            answers = [get(base + path, header) for path in paths for header in headers]
            shown = sum(status not in (401, 403) or word in text for status, text in answers)
            opened = word in get(f"{base}api/trajectories?token={token}", {})[1]
    text = f"{shown} of {len(answers)} foreign requests answered; with the token {'shown' if opened else 'NOT shown'}"
    return Measured(text, holds=opened and not shown)


def get(url: str, headers: dict[str, str]) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


PROMISES: dict[str, tuple[str, Callable[[int], Measured]]] = {
    "weights": ("No earlier version of the weights passes as the newest", weights),
    "gradients": ("A token keeps its gradient in bfloat16, however confident the policy is", gradients),
    "off-policy": ("A batch that is too far from its sampler is refused, and the clip binds stale tokens", off_policy),
    "splits": ("Demonstrations, RL, PRM and evaluation share no task and no question", splits),
    "reproduction": ("At depth 0 a run that was killed and resumed ends with the same bytes", reproduction),
    "sandbox": ("No attack of the corpus escapes either tier of the sandbox", sandbox),
    "keys": ("No API key is in a run folder, in Ray's logs or in the viewer", keys),
    "viewer": ("A run is shown only to requests with the viewer's token", viewer),
}
QUICK = ("weights", "gradients", "off-policy", "splits", "viewer")
"""Promises that take seconds."""


def measure(name: str, seed: int) -> Measured:
    """Measure in a fresh process; an exception counts as a promise that does not hold."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(PROMISES[name][1], seed).result()
        except Exception as error:
            return Measured(f"{type(error).__name__}: {error}", holds=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of every measurement's random numbers (default 0)")
    parser.add_argument("--only", nargs="+", choices=list(PROMISES), default=list(PROMISES), metavar="NAME")
    options = parser.parse_args(arguments)
    table, broken = Table("promise", "statement", "measured just now", "s", "holds", title=f"seed {options.seed}"), []
    for name in options.only:
        started = time.perf_counter()
        result = measure(name, options.seed)
        seconds = f"{time.perf_counter() - started:.1f}"
        table.add_row(name, PROMISES[name][0], result.text, seconds, "yes" if result.holds else "NO")
        broken += [] if result.holds else [name]
    Console(width=150).print(table)
    print(f"does not hold: {', '.join(broken)}" if broken else "all hold")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
