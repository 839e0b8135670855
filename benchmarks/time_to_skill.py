"""Seconds of RL until a skill is learned, this system against TRL's GRPOTrainer, from the same start on the same CPU.

    python -m benchmarks.time_to_skill [--job clerk] [--seeds 0,1,2] [--threshold 0.8] [key=value ...]

The job is `benchmarks/expressions.toml` (key=value changes it), in which a reply turns a sentence into one expression,
or `benchmarks/clerk.toml`, in which an answer needs two calls of a tool.
For each seed a cold start makes an adapter, and both sides continue from it with the same model, LoRA, prompts (token
for token, in the same order), reward, 8 groups of 8 per train step, temperature 1, constant learning rate, DAPO loss
with the same clipping and no KL term. Both have one thread for each of two cores.

The clock measures RL alone: it starts when both sides are about to begin their first step, with engine and model
loaded. Adapters are saved on the way; one evaluator, our engine at the temperature of training, scores each on held-out
tasks. The first evaluation at or above the threshold counts. TRL is ended there, or after `--patience` times our
seconds, and then the ratio is a lower bound.

Our side is the complete system (Ray, agent over the HTTP endpoint, vLLM, verified weight sync, checkpoints), all of it
on the clock, asynchronous at the recipe's depth; groups without signal are replaced, so that every step trains on 64
attempts with a gradient. TRL is the pinned version in its own environment (`trl_peer.py`) with the settings that are
fastest on a CPU; its saving and waiting are off the clock. Each of `--trl-variants` makes two steps first, and the
variant with the fastest second step runs.

Results are kept in `--out`, one JSON file per curve, and not measured again.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from actors.launch import KEEP_MEMORY
from benchmarks.runs import train_steps
from configs.learner import DapoConfig
from configs.loading import load_run_config
from configs.run import RunConfig
from envs.datasets.sampler import evaluation_tasks, training_tasks
from envs.types import ToolCall
from learner.checkpoint import checkpoints_in
from learner.optim import MAX_GRAD_NORM
from ray_jobs.cold_start import cold_start
from ray_jobs.held_out import attempt_all
from ray_jobs.run.local import open_policy
from ray_jobs.run.model_folder import cache_dir, resolve_model
from ray_jobs.run.preflight import check_before_start
from ray_jobs.run.run import open_run
from ray_jobs.train import reinforce
from rollout.agent.agent import build_chat
from rollout.codec import Record
from rollout.endpoint.messages import ChatMessage, call_text, turns_of
from rollout.engines.adapters import AdapterMerger
from rollout.types import Message, Trajectory
from rollout.worker import Worker

JOBS = ("expressions", "clerk")
TRL = "1.16.0"
SAME_VERSIONS = ("torch", "transformers", "peft", "accelerate", "datasets", "numpy", "msgspec")
NUM_PROMPTS = 2000
STARTED_WITH = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
"""The environment for another interpreter: an engine in this process changes its own."""


@dataclass(frozen=True, slots=True)
class Saved:
    """An adapter that training saved after `seconds` of RL and `sampled` attempts."""

    step: int
    seconds: float
    sampled: int
    adapter: Path


@dataclass(frozen=True, slots=True)
class Curve:
    """Evaluations of one side: rows of step, seconds, sampled attempts, and share of the held-out tasks solved."""

    arm: str
    points: list[tuple[int, float, int, float]]

    def end(self, threshold: float) -> tuple[int, float, int, float]:
        """Return the first point at or above the threshold, or the last one."""
        return next((point for point in self.points if point[3] >= threshold), self.points[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, default=JOBS[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threshold", type=float, default=0.8, help="share of the held-out tasks that is the skill")
    parser.add_argument("--every", type=int, default=2, help="train steps between two evaluations")
    parser.add_argument("--patience", type=float, default=6.0, help="TRL ends after this many times our seconds")
    parser.add_argument(
        "--trl-variants", help="dtype and microbatches per train step, as in float32:4, separated by commas"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/time-to-skill"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print("| seed | side | at the start | seconds | reached | train steps | attempts sampled |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for seed in map(int, options.seeds.split(",")):
        config, trl_config = (make_config(options, name, seed) for name in (f"ours-{seed}", f"trl-{seed}"))
        ours = kept(options.out / f"ours-{seed}.json", lambda config=config: measure_ours(config, options.threshold))
        limit_s = options.patience * ours.end(options.threshold)[1]
        start = start_adapter(config)
        trl = kept(
            options.out / f"trl-{seed}.json",
            lambda config=trl_config, start=start, limit_s=limit_s: measure_trl(options, config, start, limit_s),
        )
        for curve in (ours, trl):
            step, seconds, sampled, rate = curve.end(options.threshold)
            reached = "yes" if rate >= options.threshold else "no"
            first = f"{curve.points[0][3]:.1%}"
            print(f"| {seed} | {curve.arm} | {first} | {seconds:.0f} | {reached}, {rate:.1%} | {step} | {sampled:,} |")
        print(
            f"seed {seed}: TRL needs {trl.end(options.threshold)[1] / ours.end(options.threshold)[1]:.1f}x", flush=True
        )


def make_config(options: argparse.Namespace, name: str, seed: int) -> RunConfig:
    checkpoints = (f"learner.checkpoint_every={options.every}", "learner.keep_checkpoints=10000")
    own = (f"name={name}", f"output_dir={options.out}", f"seed={seed}", *checkpoints)
    return load_run_config(Path(__file__).with_name(f"{options.job}.toml"), [*own, *options.overrides])


def kept(path: Path, measure: Callable[[], Curve]) -> Curve:
    """Return the curve in the file, which is measured first if it does not exist."""
    if not path.exists():
        curve = measure()
        path.write_text(json.dumps({"arm": curve.arm, "points": curve.points}, indent=1))
    row = json.loads(path.read_text())
    return Curve(arm=row["arm"], points=[tuple(point) for point in row["points"]])


def start_adapter(config: RunConfig) -> Path:
    """Return the adapter that the cold start of our run made."""
    (folder,) = checkpoints_in(config.run_path / "cold_start")
    return folder / "adapter.safetensors"


@contextmanager
def held_out(config: RunConfig) -> Iterator[Callable[[Saved], tuple[int, float, int, float]]]:
    """Open our engine; yield a function that evaluates an adapter with the same random numbers for every adapter."""
    versions = count(1)
    wanted = [(task, config.seed, task.id) for task in evaluation_tasks(config)]

    async def rate_of(worker: Worker, adapter: bytes) -> float:
        await worker.engine.load_adapter(next(versions), adapter)
        rewards: list[float] = []

        def keep(_: Trajectory, record: Record) -> None:
            rewards.append(record["reward"])

        await attempt_all(worker, wanted, keep, phase="held_out", temperature=config.rollout.temperature)
        return sum(rewards) / len(rewards)

    with open_policy(config, None) as worker, asyncio.Runner() as runner:

        def evaluate(saved: Saved) -> tuple[int, float, int, float]:
            rate = runner.run(rate_of(worker, saved.adapter.read_bytes()))
            print(f"step {saved.step}, {saved.seconds:.1f} s of RL, {rate:.1%} of the held-out tasks", flush=True)
            return saved.step, saved.seconds, saved.sampled, rate

        yield evaluate


def measure_ours(config: RunConfig, threshold: float) -> Curve:
    """Train a complete run and evaluate its checkpoints up to the threshold."""
    shutil.rmtree(config.run_path, ignore_errors=True)
    with open_run(config, check_before_start(config), with_prm=False) as run:
        cold_start(run)
        started = time.time()
        reinforce(run)
    sampled = {row["step"]: row["rollout/trajectories"] for row in train_steps(config.run_path)}
    saved = [Saved(step=0, seconds=0.0, sampled=0, adapter=start_adapter(config))]
    for manifest in (folder / "manifest.json" for folder in checkpoints_in(config.run_path / "checkpoints")):
        step = json.loads(manifest.read_text())["step"]
        attempts = round(sum(num for at, num in sampled.items() if at <= step))
        # The manifest is written last, so its time is that of the complete checkpoint.
        seconds = manifest.stat().st_mtime - started
        saved.append(Saved(step, seconds, attempts, manifest.with_name("adapter.safetensors")))
    curve = Curve(arm="this system", points=[])
    with held_out(config) as evaluate:
        for checkpoint in saved:
            curve.points.append(evaluate(checkpoint))
            if curve.points[-1][3] >= threshold:
                break
    return curve


def measure_trl(options: argparse.Namespace, config: RunConfig, start: Path, limit_s: float) -> Curve:
    """Train with TRL's fastest variant until it reaches the threshold or the limit."""
    precision = config.learner.precision
    variants = (options.trl_variants or f"{precision}:1,{precision}:4").split(",")
    second_step_s: dict[str, float] = {}
    for variant in variants if len(variants) > 1 else ():
        ends: list[float] = []

        def trial(saved: Saved, ends: list[float] = ends) -> bool:
            ends.append(saved.seconds)
            return saved.step < 2

        train_trl(config, start, variant, every=1, on_saved=trial)
        second_step_s[variant] = ends[2] - ends[1]
        print(f"TRL, {variant}: {second_step_s[variant]:.1f} s in its second step", flush=True)
    variant = min(variants, key=lambda name: second_step_s.get(name, 0.0))
    curve = Curve(arm=f"TRL {TRL}, {variant}", points=[])
    with held_out(config) as evaluate:

        def judge(saved: Saved) -> bool:
            curve.points.append(evaluate(saved))
            return curve.points[-1][3] < options.threshold and saved.seconds < limit_s

        train_trl(config, start, variant, every=options.every, on_saved=judge)
    return curve


def train_trl(config: RunConfig, start: Path, variant: str, *, every: int, on_saved: Callable[[Saved], bool]) -> None:
    """Run the trainer; it waits after every saved adapter until `on_saved` decides whether it continues."""
    folder, per_step = config.run_path, config.batch_groups * config.rollout.group_size
    shutil.rmtree(folder, ignore_errors=True)
    model_path, scale = resolve_model(config.model.path), config.model.lora_alpha / config.model.lora_rank
    AdapterMerger(model_path, scale).write_adapter_folder(folder / "start", start.read_bytes())
    (folder / "job.json").write_text(json.dumps(trl_job(config, model_path, variant) | {"every": every}))
    command = [str(trl_python()), str(Path(__file__).with_name("trl_peer.py")), str(folder / "job.json")]
    threads = {"OMP_NUM_THREADS": str(config.learner.num_threads), "TOKENIZERS_PARALLELISM": "false"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = STARTED_WITH | threads | dict(KEEP_MEMORY)
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(command, env=environment, stderr=log, **pipes) as peer,
    ):
        for line in peer.stdout or ():
            row = json.loads(line)
            saved = Saved(row["step"], row["seconds"], row["step"] * per_step, Path(row["adapter"]))
            print("continue" if on_saved(saved) else "stop", file=peer.stdin, flush=True)
    if peer.returncode:
        sys.exit(f"TRL ended with exit code {peer.returncode}; see {folder}/log.txt")


def trl_job(config: RunConfig, model_path: Path, variant: str) -> dict[str, Any]:
    """Return the settings and prompts that `trl_peer.py` reads.

    `token_ids` are those that our side sends: of each prompt and, under `results`, after a call with these results.
    """
    (name,) = config.envs.mix
    job, chat, sampler = import_module(f"benchmarks.{name}"), build_chat(model_path), training_tasks(config)
    described = [json.dumps(job.DESCRIBED)] if job.DESCRIBED else []
    rows, after_calls = [], []
    for task in map(sampler.task, range(NUM_PROMPTS)):
        turns = turns_of([ChatMessage(role="user", content=task.question)], described)
        prompt = [{"role": turn.role, "content": turn.content} for turn in turns]
        rows.append({"prompt": prompt, "token_ids": list(chat.dialogue(turns)), **job.columns(task)})
    if job.TOOLS:
        call = call_text(ToolCall(name="look", arguments="{}"))
        pages = [*job.PAGES.values(), job.look(""), job.result_of("find", "{}")]
        for results in (pages[:2], *([page] for page in pages)):
            answered = [*turns, Message(role="assistant", content=call)]
            told = turns_of([ChatMessage(role="tool", content=result) for result in results])
            ids = chat.continuation([*answered, *told], len(answered), chat.encode_completion(call))
            after_calls.append({"results": results, "token_ids": list(ids)})
    dtype, microbatches = variant.split(":")
    return {
        "model_path": str(model_path),
        "output_dir": str(config.run_path),
        "adapter": str(config.run_path / "start"),
        "job": name,
        "rows": rows,
        "after_calls": after_calls,
        "dtype": dtype,
        "microbatch": config.batch_groups * config.rollout.group_size // int(microbatches),
        "num_threads": config.learner.num_threads,
        "groups": config.batch_groups,
        "group_size": config.rollout.group_size,
        "max_tokens": job.MAX_TOKENS,
        "temperature": config.rollout.temperature,
        "learning_rate": config.learner.learning_rate,
        "max_grad_norm": MAX_GRAD_NORM,
        "clip_low": DapoConfig().clip_low,
        "clip_high": DapoConfig().clip_high,
        "seed": config.seed,
    }


def trl_python() -> Path:
    """Return the interpreter of TRL's environment, which is created at its first use with our library versions."""
    folder = cache_dir() / f"trl-{TRL}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        sys.exit("uv is needed to install TRL: run `make setup` or `pip install uv`")
    print(f"installing TRL {TRL} into {folder} ...", flush=True)
    environment = dict(STARTED_WITH)
    if "PIP_FIND_LINKS" in environment:
        environment.setdefault("UV_FIND_LINKS", environment["PIP_FIND_LINKS"])
    elif "UV_FIND_LINKS" not in environment:
        environment.setdefault("UV_TORCH_BACKEND", "cpu")
    if "PIP_INDEX_URL" in environment:
        environment.setdefault("UV_DEFAULT_INDEX", environment["PIP_INDEX_URL"])
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in SAME_VERSIONS]
    install = [uv, "pip", "install", "-q", "--python", str(python), f"trl=={TRL}", *pins]
    for command in ([uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)], install):
        subprocess.run(command, check=True, env=environment)
    (folder / "complete").touch()
    return python


if __name__ == "__main__":
    main()
