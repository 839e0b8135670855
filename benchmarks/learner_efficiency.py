"""Learner throughput: seconds of a train step, distinct tokens a second, and the share of the machine's matrix peak.

    python -m benchmarks.learner_efficiency [--groups 4] [--repeats 5] [key=value ...]

One process runs the demo recipe's learner (key=value changes the recipe) on groups of siblings that diverge at their
second decision, and times a train step, from samples to the optimizer step. The first repetition warms up and is not
counted. A prefix that siblings share is computed once; that this changes no gradient is a test
(`tests/learner/test_learner.py`).

Useful FLOP count distinct tokens only: for each linear layer of the frozen base a forward product and the gradient of
its input, for the adapter also the gradient of its weights, attention over the ancestors of a token, and the output
head at trained positions.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from actors.launch import training_env
from configs.loading import DEFAULT_RECIPE, load_run_config
from configs.run import RunConfig
from envs.datasets.sampler import demonstration_tasks
from learner.learner import Learner
from learner.packing import build_batch, pack
from learner.types import GrammarSpan, TrainingSample
from ray_jobs.run.model_folder import resolve_model
from rollout.agent.planner import ACTIONS, Decision, planner_grammar
from rollout.chat import ChatFormat
from tests.learner.tiny import sample


def make_learner(config: RunConfig) -> Learner:
    """Return the recipe's learner without its guard, with an adapter that is not zero."""
    # The samples' log-probs are the learner's before the first step, so the guard has nothing to guard.
    settings = config.learner.model_copy(update={"guard": False})
    learner = Learner(resolve_model(config.model.path), config.model, settings, seed=config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    for parameter in learner.policy.trainable_parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return learner


def sibling_samples(learner: Learner, *, num_groups: int, group_size: int) -> list[TrainingSample]:
    """Return groups of demonstrations that diverge at their second decision.

    The recorded log-probs are the learner's own, changed by up to 0.05 nats: nearly every token is inside the clipping
    range and has a gradient.
    """
    chat, grammar = ChatFormat(learner.policy.tokenizer), planner_grammar(ACTIONS)
    rng = np.random.default_rng(0)
    samples = []
    for generated in demonstration_tasks({"lookup": 1.0}, count=num_groups, seed=0):
        for sibling in range(group_size):
            ids = list(chat.prompt("Solve the task step by step with tools.", f"Task: {generated.task.question}"))
            mask, spans = [False] * len(ids), []
            for number, step in enumerate(generated.plan):
                thought = step.thought + (" so" * sibling if number else "")
                text = Decision(thought=thought, action=step.action, action_input=step.action_input).to_json()
                sampled = chat.encode_completion(text)
                spans.append(GrammarSpan(start=len(ids), end=len(ids) + len(sampled), grammar=grammar))
                bridge = chat.bridge(sampled, f"Result: {step.action_input}\nNext step.")
                ids += sampled + bridge
                mask += [True] * len(sampled) + [False] * len(bridge)
            loss_mask = np.array(mask)
            name, advantage = f"{generated.task.id}/{sibling}", sibling % 2 - 0.5
            one = replace(
                sample(ids, np.flatnonzero(loss_mask), advantage=advantage, name=name), grammar_spans=tuple(spans)
            )
            with torch.no_grad():
                logprobs = learner.policy.logprobs([one])[0].cpu().numpy()
            logprobs = logprobs + rng.uniform(-0.05, 0.05, len(ids)).astype(np.float32)
            samples.append(replace(one, rollout_logprobs=np.where(loss_mask, logprobs, np.float32(0))))
    return samples


def useful_flop(learner: Learner, samples: Sequence[TrainingSample]) -> float:
    """Return the FLOP that a train step over these samples needs."""
    row, config = pack(samples), learner.policy.model.config
    contexts = {int(n[t - 1]) for n, s in zip(row.node_of, samples, strict=True) for t in np.nonzero(s.loss_mask)[0]}
    named = dict(learner.policy.model.named_parameters())
    base = sum(p.numel() for n, p in named.items() if p.ndim == 2 and "lora" not in n and "embed" not in n)
    lora = sum(p.numel() for n, p in named.items() if "lora" in n)
    head = config.vocab_size * config.hidden_size
    base -= head if any("lm_head" in name for name in named) else 0
    attention = 4 * config.hidden_size * int((row.positions + 1).sum()) * config.num_hidden_layers
    return len(row.token_ids) * (4 * base + 6 * lora) + 3 * attention + 4 * head * len(contexts)


def matrix_peak(dtype: torch.dtype, size: int = 2048, repeats: int = 10) -> float:
    """Return the FLOP/s of the fastest of `repeats` square matrix products."""
    left, right = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def main() -> None:
    num_threads = os.cpu_count() or 1
    environment = training_env(num_threads, "cpu")
    if not environment.items() <= os.environ.items():
        # An allocator and a thread pool read these variables when the process starts, as in the learner's actor.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | environment)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4, help="groups per train step (default 4)")
    parser.add_argument("--repeats", type=int, default=5, help="counted repetitions (default 5)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the demo recipe")
    options = parser.parse_args()
    config = load_run_config(DEFAULT_RECIPE, options.overrides)
    torch.set_num_threads(num_threads)
    learner = make_learner(config)
    samples = sibling_samples(learner, num_groups=options.groups, group_size=config.rollout.group_size)
    batch = build_batch(samples, microbatch_tokens=config.learner.microbatch_tokens)
    steps = [learner.train_step(batch).metrics for _ in range(options.repeats + 1)][1:]
    seconds = [step["learner/step_s"] for step in steps]
    median, distinct = statistics.median(seconds), steps[0]["learner/packed_tokens"]
    print(
        f"{len(samples)} trajectories, {steps[0]['learner/sequence_tokens']:.0f} tokens, {distinct:.0f} distinct; "
        f"{median:.2f} s a step ({min(seconds):.2f} to {max(seconds):.2f}), {distinct / median:.0f} distinct tokens/s"
    )
    rate = sum(useful_flop(learner, rows) for rows in batch.microbatches) / median
    precision = config.learner.precision
    peak = matrix_peak(getattr(torch, precision))
    print(f"learner {rate / 1e9:.0f} GFLOP/s, {precision} matrix peak {peak / 1e9:.0f}: {rate / peak:.0%}")


if __name__ == "__main__":
    main()
