"""Trained trajectories per second, ours against TRL's GRPOTrainer, on the same job on the same CPU.

    python -m benchmarks.against_trl [--steps 6] [--trl-steps 4] [--repeats 1] [--depth 2] [--out runs/against-trl]

The job, equal on both sides: the demo model (SmolLM2-135M-Instruct, one folder), LoRA of the same rank on the same
layers, the demo's tasks as single-turn prompts (the planner must answer at once), token for token the same prompts in
the same order, completions of at most 40 tokens at temperature 1, 8 groups of 8 per train step, DAPO loss with the same
clipping and step size, no KL term, two threads. The reward is a coin that the completion's text decides: both sides'
groups have the same signal, and no side's policy gets better, shorter or done. Timed are train steps 2 to N, with
generation, reward, update and all that lies between two steps; the first one warms both sides up. Only trained
trajectories count. Groups in which all coins fall alike train nothing with us and are replaced; TRL trains them, and
is credited with them.

Ours: the real actors, engine, store, ledger and learner of the demo recipe, asynchronous (`--depth 0` for synchronous),
every new version published, loaded and proven, every turn under the planner's grammar, in engine and learner. Rollouts
run ahead, so the first timed batch was begun before the clock; as much is begun inside and left when it stops. To be
sure, the rate at which rollouts were finished inside the timed steps is printed too, and the lower of both is ours.

TRL: the pinned version in an environment of its own, with our very versions of torch, transformers and PEFT, run by
`trl_peer.py`. It gets the settings that suit a CPU: all 64 completions generated as one batch, no gradient
checkpointing, bf16 mixed precision (its default), its fused LM head, no reference model (KL weight 0), so no extra
forward, no logging of texts, no saving, and, as our learner, an allocator that keeps what it has: without it a batch of
14 GB of activations spends half of its time in page faults. vLLM is off because TRL runs it on
accelerators only. Weights may be loaded in float32 (TRL's default) or bf16, and the update may go through in one or
several microbatches: every `--trl-variants` is measured, and the fastest counts. TRL has neither a grammar nor our
acknowledged weight sync to pay for.

Completions must be of like length for the rates to mean the same: tokens per completion are printed, and the ratio of
trained completion tokens per second beside that of trajectories. The lower one is the result (target 5x).

What to expect: vLLM's CPU decoding is several times faster than `generate`, a group's prompt is computed once and not
eight times, and there is no padding. Generation and update overlap, but share the cores, which gains little.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

from ray_jobs.run.actors import RunActors

from actors.cluster import start_ray, stop_ray
from benchmarks.trl_environment import trl_process_environment, trl_python, trl_settings
from benchmarks.trl_peer import coin
from configs.loading import load_run_config
from configs.run import RunConfig
from envs.datasets.sampler import TaskSampler
from envs.tools.toolbox import Toolbox
from learner.learner import Learner
from ray_jobs.commands.given import DEFAULT_RECIPE
from ray_jobs.phases.cold_start import cold_start
from ray_jobs.run.console import Console
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.model_folder import resolve_model
from ray_jobs.run.run import Run
from ray_jobs.train import reinforce
from reward.judging import OutcomeReward
from reward.types import Reward
from rollout.agent.agent import build_chat
from rollout.agent.planner import PlannerDialogue, PlannerSettings
from rollout.types import Trajectory
from rollout.worker import Worker

PEER = Path(__file__).with_name("trl_peer.py")
TARGET = 5.0
JOB = (
    "envs.mix={lookup=0.9, two_lookup=0.1}",
    "envs.choice=mix",
    "batch_groups=8",
    "rollout.group_size=8",
    "rollout.max_steps=1",
    "rollout.max_turn_tokens=40",
    "rollout.temperature=1.0",
    "reward.credit=outcome",
    "learner.loss.type=dapo",
    "learner.schedule=constant",
    "learner.warmup_steps=0",
    "cold_start.num_demonstrations=0",
)
"""Changes to the demo recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """`finished_per_s`: completions sampled per second of the same time; TRL trains on exactly those."""

    name: str
    trajectories_per_s: float
    finished_per_s: float
    tokens_per_completion: float
    step_s: tuple[float, ...]
    note: str

    @property
    def lower_per_s(self) -> float:
        return min(self.trajectories_per_s, self.finished_per_s)


def main() -> None:
    options = _options()
    ours, theirs = [], []
    for repeat in range(options.repeats):
        ours.append(_shown(measure_ours(options, repeat)))
        for variant in options.trl_variants.split(","):
            theirs.append(_shown(measure_trl(options, repeat, variant)))
    print(_verdict(ours, theirs))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/against-trl"))
    parser.add_argument("--steps", type=int, default=6, help="train steps of ours, the first of which is not timed")
    parser.add_argument("--trl-steps", type=int, default=4, help="train steps of TRL, the first of which is not timed")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--depth", type=int, default=2, help="pipeline_depth of ours")
    parser.add_argument(
        "--trl-variants",
        default="bfloat16:1,bfloat16:8,float32:8",
        help="dtype of TRL's weights and microbatches per train step, several with commas; the fastest counts",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further changes to the demo recipe")
    return parser.parse_args()


def _config(options: argparse.Namespace, name: str) -> RunConfig:
    own = (f"name={name}", f"output_dir={options.out}", f"num_steps={options.steps}", f"pipeline_depth={options.depth}")
    return load_run_config(DEFAULT_RECIPE, [*JOB, *own, *options.overrides])


# --- ours --------------------------------------------------------------------------------------------


def measure_ours(options: argparse.Namespace, repeat: int) -> Rate:
    config = _config(options, f"ours-{repeat}")
    shutil.rmtree(config.run_path, ignore_errors=True)
    model_path = resolve_model(config.model.path)
    with RunFolder.open(config, with_prm=False) as folder:
        start_ray(config.cluster)
        try:
            facts = _reinforce(config, folder, model_path)
        finally:
            stop_ray()
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").open(encoding="utf-8")]
    rows = [row for row in rows if "policy/loss" in row]
    timed = rows[1:]
    # From log line to log line: all that happens between two steps is in it.
    wall_s = rows[-1]["wall_s"] - rows[0]["wall_s"]
    # A step during which no group ended has none, and no mean of their tokens.
    ended = [row for row in timed if row["rollout/trajectories"]]
    finished = sum(row["rollout/trajectories"] for row in ended)
    trained = facts["groups"]["trained"] / len(rows) * len(timed) * config.rollout.group_size
    return Rate(
        name=f"ours, depth {config.pipeline_depth}",
        trajectories_per_s=trained / wall_s,
        finished_per_s=finished / wall_s,
        tokens_per_completion=sum(row["rollout/sampled_tokens"] * row["rollout/trajectories"] for row in ended)
        / finished,
        step_s=tuple(later["wall_s"] - row["wall_s"] for row, later in zip(rows, timed, strict=False)),
        note=f"{facts['groups']['filtered']} of {facts['groups']['drawn']} groups without signal",
    )


def _reinforce(config: RunConfig, folder: RunFolder, model_path: Path) -> Any:
    """The RL phase of a run, from the untouched model; its facts."""
    actors = RunActors(
        config,
        folder,
        build_learner=partial(_build_learner, config, model_path),
        build_worker=partial(_build_worker, config, model_path),
    )
    actors.start_worker(0)
    actors.wait_until_ready()
    run = Run(config=config, console=Console(), folder=folder, actors=actors)
    cold_start(run)
    facts = reinforce(run)
    actors.close()
    return facts


def _build_learner(config: RunConfig, model_path: Path) -> Learner:
    return Learner(model_path, config.model, config.learner, seed=config.seed)


def _build_worker(config: RunConfig, model_path: Path, index: int) -> Worker:
    # This runs in the worker's process, where groups are scored.
    OutcomeReward.score = _flip_coin
    return Worker(config, model_path, index=index)


def _flip_coin(self: OutcomeReward, trajectory: Trajectory) -> Reward:
    value = coin("".join(turn.completion.text for turn in trajectory.planner_turns))
    return Reward(outcome=value, total=value, parts={"outcome": value})


# --- TRL's -------------------------------------------------------------------------------------------


def measure_trl(options: argparse.Namespace, repeat: int, variant: str) -> Rate:
    config = _config(options, f"trl-{repeat}-{variant.replace(':', '-')}")
    python = trl_python()
    folder = config.run_path
    folder.mkdir(parents=True, exist_ok=True)
    job = {
        **trl_settings(config, variant, autocast=True, steps=options.trl_steps, seed=config.seed + repeat),
        "prompts": _prompts(config, config.batch_groups * options.trl_steps),
        "lora_rank": config.model.lora_rank,
        "lora_alpha": config.model.lora_alpha,
        "lora_targets": config.model.lora_targets,
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [str(python), str(PEER), str(folder / "job.json")]
    done = subprocess.run(command, env=trl_process_environment(config), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    said = json.loads(done.stdout.strip().splitlines()[-1])
    rate = said["trajectories_per_step"] / statistics.mean(said["step_s"])
    versions = ", ".join(f"{name} {version}" for name, version in said["versions"].items())
    dtype, microbatches = variant.split(":")
    return Rate(
        name=f"TRL, {dtype} weights, {microbatches} microbatch{'es' if microbatches != '1' else ''} a step",
        trajectories_per_s=rate,
        finished_per_s=rate,
        tokens_per_completion=said["tokens_per_completion"],
        step_s=tuple(said["step_s"]),
        note=f"{said['without_signal']:.0%} of the groups without signal; {versions}",
    )


def _prompts(config: RunConfig, count: int) -> list[dict[str, Any]]:
    """What the planner is sent for the first `count` tasks, as token ids and as the text that becomes them."""
    chat = build_chat(resolve_model(config.model.path))
    settings = PlannerSettings(
        actions=config.envs.actions,
        max_steps=config.rollout.max_steps,
        max_turn_tokens=config.rollout.max_turn_tokens,
        temperature=config.rollout.temperature,
    )
    sampler = TaskSampler(config.envs.mix, seed=config.seed)
    nobody: Any = None
    prompts = []
    with Toolbox(config.envs) as toolbox, toolbox.episode() as tools:
        for ordinal in range(count):
            task = sampler.task(ordinal)
            ids = PlannerDialogue(nobody, chat, settings, task, tools, task.id)._context
            prompts.append({"token_ids": list(ids), "text": chat.rendered(ids)})
    return prompts


# --- the result --------------------------------------------------------------------------------------


def _shown(rate: Rate) -> Rate:
    steps = ", ".join(f"{seconds:.1f}" for seconds in rate.step_s)
    print(
        f"{rate.name}: {rate.trajectories_per_s:.2f} trained trajectories/s ({rate.finished_per_s:.2f} finished), "
        f"{rate.tokens_per_completion:.1f} tokens per completion, steps of {steps} s; {rate.note}",
        flush=True,
    )
    return rate


def _verdict(ours: Sequence[Rate], theirs: Sequence[Rate]) -> str:
    """Our slowest repetition against TRL's fastest."""
    own, other = min(ours, key=lambda rate: rate.lower_per_s), max(theirs, key=lambda rate: rate.lower_per_s)
    by_trajectory = own.lower_per_s / other.lower_per_s
    by_token = by_trajectory * own.tokens_per_completion / other.tokens_per_completion
    return (
        f"ours {own.lower_per_s:.2f} trajectories/s, TRL {other.lower_per_s:.2f} ({other.name}): "
        f"{by_trajectory:.1f}x by trajectories, {by_token:.1f}x by completion tokens; "
        f"the lower one counts: {min(by_trajectory, by_token):.1f}x (target {TARGET:g}x)"
    )


if __name__ == "__main__":
    main()
