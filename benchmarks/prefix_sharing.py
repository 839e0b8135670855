"""What computing a shared prefix once is worth: the learner's prefix-tree packing against the same learner without it.

    python -m benchmarks.prefix_sharing [--groups 4] [--repeats 5] [--run runs/demo] [key=value ...]

One process, one learner, the demo recipe's settings (G = 8). A train step, from samples to the optimizer step, is
timed with two packings in turn: `shared` is the product's; `apart` packs every sample into a tree of its own, as if
nothing were common, into microbatches of at most the same number of tokens. All else is the same code: `apart` too
has no padding, computes attention within each sequence only, and logits at trained positions only. So the ratio is
that of sharing alone. Every repetition times both, the one that goes first alternates, and the ratio is taken within
the repetition. The first repetition warms up and is not counted.

Samples are real: the recipe's prompts in the model's chat template, decisions of several turns played through the
real agent and tools. Two kinds, and with `--run` a third:

    demo         siblings as the cold-started policy samples them: half solve the task, half guess or go wrong, in the
                 demonstrations' words, so that siblings often share whole turns. The target is for these.
    prompt only  every sibling differs from its first sampled word on: what is left is the prompt. A lower bound.
    recorded     the trained groups in the trajectories.jsonl of a run.

Expect less than the ratio of the tokens, which is printed too: a tree's attention reads more keys per row than a
sequence's, smaller products run less efficiently, and the optimizer step costs the same.

At the end both packings' gradients are compared in float32 on the real model, with an adapter that is not zero. No
element may differ by 1e-5. For scale, the difference between `apart` and `apart` in other microbatches is printed too:
so much comes from the order of float32 sums alone.
"""

import argparse
import asyncio
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in the learner's actor

import numpy as np
import torch

from configs.learner import GuardConfig
from configs.loading import load_run_config
from configs.run import RunConfig
from envs.datasets.families import PlanStep
from envs.datasets.generated import GeneratedTask, wrong_plan
from envs.datasets.sampler import demonstration_tasks
from envs.tools.toolbox import Toolbox
from learner.credit import turn_advantages
from learner.learner import Learner
from learner.packing import PackedRow, TokenSequence, build_batch, pack
from learner.samples import build_samples
from learner.types import TrainBatch, TrainingSample
from ray_jobs.commands.given import DEFAULT_RECIPE
from ray_jobs.run.model_folder import resolve_model
from reward.judging import OutcomeReward
from rollout.agent.agent import build_agent, build_chat
from rollout.chat import ChatFormat
from rollout.engines.wrappers import DemonstrationEngine
from rollout.records import read_records, trajectory_of
from rollout.types import Group, Trajectory
from tests.changed import replace

TARGET_RATIO = 2.0
TARGET_GRADIENT = 1e-5
UNGUARDED = GuardConfig(min_effective_sample_share=0, max_mismatch_k3_age0=math.inf, max_mismatch_k3_stale=math.inf)
"""The samples' log-probs are the learner's own of before the first step; the guard has nothing to guard here."""


# --- the packing that shares nothing -----------------------------------------------------------------


def pack_apart(samples: Sequence[TokenSequence]) -> PackedRow:
    """As `pack`, with a tree of its own for every sample."""
    rows = [pack([sample]) for sample in samples]
    starts = np.cumsum([0] + [len(row.token_ids) for row in rows])
    return PackedRow(
        token_ids=np.concatenate([row.token_ids for row in rows]),
        positions=np.concatenate([row.positions for row in rows]),
        parents=np.concatenate(
            [np.where(row.parents < 0, -1, row.parents + start) for row, start in zip(rows, starts, strict=False)]
        ),
        node_of=tuple(row.node_of[0] + start for row, start in zip(rows, starts, strict=False)),
    )


def batch_apart(samples: Sequence[TrainingSample], *, microbatch_tokens: int) -> TrainBatch:
    """As `build_batch`, with every token counted."""
    microbatches: list[list[TrainingSample]] = []
    room = 0
    for sample in samples:
        if not microbatches or len(sample.token_ids) > room:
            microbatches.append([])
            room = microbatch_tokens
        microbatches[-1].append(sample)
        room -= len(sample.token_ids)
    batch = build_batch(samples, microbatch_tokens=microbatch_tokens)
    return replace(batch, microbatches=tuple(map(tuple, microbatches)))


@contextmanager
def nothing_shared() -> Iterator[None]:
    """The learner packs with `pack_apart`."""
    with patch("learner.policy.pack", pack_apart):
        yield


# --- the samples -------------------------------------------------------------------------------------


def played_samples(config: RunConfig, *, num_groups: int, prompt_only: bool) -> list[TrainingSample]:
    """Groups of demonstrations, half of them wrong, with the advantages that the outcomes give them."""
    chat = build_chat(resolve_model(config.model.path))
    judge = OutcomeReward(config.learner, max_turn_tokens=config.rollout.max_turn_tokens)
    samples = []
    with Toolbox(config.envs) as toolbox:
        for number, task in enumerate(demonstration_tasks(config.envs.mix, count=num_groups, seed=config.seed)):
            scored = judge.score_group(asyncio.run(_play_group(config, chat, toolbox, task, number, prompt_only)))
            advantages = turn_advantages(scored, credit="outcome", prm_weight=0.0)
            samples += build_samples(scored.group, advantages, temperature=config.rollout.temperature)
    return samples


async def _play_group(
    config: RunConfig, chat: ChatFormat, toolbox: Toolbox, generated: GeneratedTask, number: int, prompt_only: bool
) -> Group:
    async def play(index: int) -> Trajectory:
        plan = wrong_plan(generated.plan, random.Random(f"{number}|{index}")) if index % 2 else generated.plan
        agent = build_agent(
            config,
            engine=DemonstrationEngine(chat, _worded(plan, index) if prompt_only else plan),
            chat=chat,
            tools_for_episode=toolbox.episode,
            temperature=config.rollout.temperature,
        )
        return await agent.run(generated.task, trajectory_id=f"g{number}/{index}", group_id=f"g{number}")

    played = await asyncio.gather(*map(play, range(config.rollout.group_size)))
    return Group(id=f"g{number}", trajectories=tuple(played))


def _worded(plan: Sequence[PlanStep], index: int) -> list[PlanStep]:
    """The plan with a first thought that no sibling begins with."""
    words = ("Alright", "Because", "Clearly", "During", "Every", "First", "Given", "However")
    word = words[index % len(words)] + "!" * (index // len(words))
    return [replace(plan[0], thought=f"{word}, {plan[0].thought}"), *plan[1:]]


def recorded_samples(config: RunConfig, folder: Path) -> list[TrainingSample]:
    """The groups that a run logged as trained, one per train step, with the advantages that they had."""
    rows = [row for row in read_records(folder / "trajectories.jsonl") if "advantages" in row]
    samples = []
    for _, records in groupby(rows, key=lambda row: row["step"]):
        group_rows = list(records)
        trajectories = tuple(map(trajectory_of, group_rows))
        group = Group(id=trajectories[0].group_id, trajectories=trajectories)
        advantages = [row["advantages"] for row in group_rows]
        samples += build_samples(group, advantages, temperature=config.rollout.temperature)
    return samples


def with_own_logprobs(learner: Learner, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples as this learner would have sampled them, but for up to 0.05 nats: nearly every token is inside the
    clipping range and carries a gradient, and none is at the tie of the clipped with the unclipped objective."""
    rng = np.random.default_rng(0)
    changed = []
    for sample in samples:
        with torch.no_grad():
            own = learner.policy.logprobs([sample])[0].cpu().numpy()
        off = rng.uniform(-0.05, 0.05, len(own)).astype(np.float32)
        changed.append(replace(sample, rollout_logprobs=np.where(sample.loss_mask, own + off, np.float32(0))))
    return changed


# --- the measurements --------------------------------------------------------------------------------


def time_step(learner: Learner, samples: Sequence[TrainingSample], *, shared: bool) -> tuple[float, float]:
    """Seconds and packed tokens of one train step."""
    microbatch_tokens = learner.config.microbatch_tokens
    started = time.perf_counter()
    if shared:
        result = learner.train_step(build_batch(samples, microbatch_tokens=microbatch_tokens))
    else:
        with nothing_shared():
            result = learner.train_step(batch_apart(samples, microbatch_tokens=microbatch_tokens))
    return time.perf_counter() - started, result.metrics["learner/packed_tokens"]


def compare_speed(learner: Learner, name: str, samples: Sequence[TrainingSample], repeats: int) -> float:
    """Print trajectories per second of both packings; returns the median of the ratios within a repetition."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    tokens: dict[bool, float] = {}
    for repeat in range(repeats + 1):
        for shared in (True, False) if repeat % 2 else (False, True):
            took, tokens[shared] = time_step(learner, samples, shared=shared)
            seconds[shared] += [took] if repeat else []
    ratios = [apart / shared for apart, shared in zip(seconds[False], seconds[True], strict=True)]
    rate = {kind: len(samples) / statistics.median(seconds[kind]) for kind in seconds}
    prompts = [int(np.nonzero(sample.loss_mask)[0][0]) for sample in samples]
    lengths = [len(sample.token_ids) for sample in samples]
    print(
        f"{name}: {len(samples)} trajectories of {statistics.mean(lengths):.0f} tokens, "
        f"{statistics.mean(prompts):.0f} of them prompt; in all {tokens[False]:.0f}, distinct {tokens[True]:.0f} "
        f"(1/{tokens[False] / tokens[True]:.2f})"
    )
    print(
        f"    shared {rate[True]:.2f} trajectories/s, apart {rate[False]:.2f}: ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f} over {repeats} repetitions)",
        flush=True,
    )
    return statistics.median(ratios)


def gradient(learner: Learner, batch: TrainBatch) -> torch.Tensor:
    """The whole gradient of the adapter for a batch; leaves none behind."""
    learner._accumulate(batch.microbatches, lambda rows: learner._rl_loss(rows, batch))
    found = torch.cat([parameter.grad.flatten() for parameter in learner.policy.trainable_parameters()])
    learner.optimizer.zero_grad()
    return found


def compare_gradients(learner: Learner, samples: Sequence[TrainingSample]) -> None:
    """Print how far the packings' gradients are apart."""
    microbatch_tokens = learner.config.microbatch_tokens
    shared = gradient(learner, build_batch(samples, microbatch_tokens=microbatch_tokens))
    with nothing_shared():
        apart = gradient(learner, batch_apart(samples, microbatch_tokens=microbatch_tokens))
        cut_otherwise = gradient(learner, batch_apart(samples, microbatch_tokens=microbatch_tokens // 2))
    norm = float(apart.norm())
    print(
        f"gradient in float32, {len(samples)} trajectories, norm {norm:.3g} "
        f"(target: no element off by {TARGET_GRADIENT:.0e})"
    )
    for name, other in (("shared against apart", shared), ("apart in other microbatches", cut_otherwise)):
        off = other - apart
        print(
            f"    {name}: largest difference {float(off.abs().max()):.1e}, relative norm {float(off.norm()) / norm:.1e}"
        )


def _learner(config: RunConfig, *, dtype: str) -> Learner:
    settings = config.learner.model_copy(update={"guard": UNGUARDED, "dtype": dtype})
    learner = Learner(
        resolve_model(config.model.path),
        config.model,
        settings,
        seed=config.seed,
    )
    generator = torch.Generator().manual_seed(config.seed)
    for parameter in learner.policy.trainable_parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return learner


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 per train step (default: the recipe's 4)")
    parser.add_argument("--repeats", type=int, default=5, help="counted repetitions, each times both packings")
    parser.add_argument("--run", type=Path, help="a run folder whose trained groups are measured too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the demo recipe")
    options = parser.parse_args()
    config = load_run_config(DEFAULT_RECIPE, options.overrides)
    learner = _learner(config, dtype="bfloat16")
    kinds = {
        "demo": played_samples(config, num_groups=options.groups, prompt_only=False),
        "prompt only": played_samples(config, num_groups=options.groups, prompt_only=True),
    }
    if options.run:
        kinds["recorded"] = recorded_samples(config, options.run)
    ratios = {
        name: compare_speed(learner, name, with_own_logprobs(learner, samples), options.repeats)
        for name, samples in kinds.items()
    }
    print(f"speed: {ratios['demo']:.2f}x on the demo's groups (target {TARGET_RATIO:.0f}x)", flush=True)
    exact = _learner(config, dtype="float32")
    few = with_own_logprobs(exact, kinds["demo"][: 2 * config.rollout.group_size])
    compare_gradients(exact, few)


if __name__ == "__main__":
    main()
