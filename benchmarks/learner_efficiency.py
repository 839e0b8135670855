"""The learner's useful arithmetic against the machine's measured matrix peak, both in the type of the recipe's
`learner.dtype`, in one run.

    python -m benchmarks.learner_efficiency

Useful work counts distinct tokens only (a shared prefix once, no padding): per linear layer of the frozen base
a forward product and the gradient of its input, for the adapter the gradient of its weights too, attention
over a token's own ancestors, and the output head at trained contexts.
"""

import math
import os
import sys
import time

import numpy as np
import torch
from ray_jobs.run.resources import training_env

from configs.learner import GuardConfig, LearnerConfig
from configs.loading import load_run_config
from configs.run import RunConfig
from envs.datasets.sampler import demonstration_tasks
from learner.learner import Learner
from learner.packing import build_batch, pack
from learner.types import GrammarSpan, TrainingSample
from ray_jobs.commands.given import DEFAULT_RECIPE
from ray_jobs.run.model_folder import resolve_model
from rollout.agent.planner import ACTIONS, Decision, planner_grammar
from rollout.chat import ChatFormat


def unguarded_learner(config: RunConfig) -> Learner:
    """The recipe's learner, but for its guard: the samples' log-probs are made up, and it would refuse every step that
    is to be timed."""
    guard = GuardConfig(min_effective_sample_share=0, max_mismatch_k3_age0=math.inf, max_mismatch_k3_stale=math.inf)
    settings: LearnerConfig = config.learner.model_copy(update={"guard": guard})
    return Learner(resolve_model(config.model.path), config.model, settings, seed=0)


def matrix_peak(dtype: torch.dtype, size: int = 2048, repeats: int = 10) -> float:
    """FLOP/s of the best of `repeats` square products."""
    left, right = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def sibling_samples(chat: ChatFormat, group_size: int = 8, num_groups: int = 2) -> list[TrainingSample]:
    """Groups of siblings that differ from their second decision on, as sampled ones do."""
    grammar = planner_grammar(ACTIONS)
    samples = []
    for generated in demonstration_tasks({"lookup": 1.0}, count=num_groups, seed=0):
        for sibling in range(group_size):
            ids = list(chat.prompt("Solve the task step by step with tools.", f"Task: {generated.task.question}"))
            mask, spans = [False] * len(ids), []
            for step in generated.plan:
                text = Decision(
                    thought=step.thought + " so" * sibling, action=step.action, action_input=step.action_input
                ).to_json()
                sampled = chat.encode_completion(text)
                spans.append(GrammarSpan(start=len(ids), end=len(ids) + len(sampled), grammar=grammar))
                bridge = chat.bridge(sampled, f"Result: {step.action_input}\nNext step.")
                ids += sampled + bridge
                mask += [True] * len(sampled) + [False] * len(bridge)
            loss_mask = np.array(mask)
            samples.append(
                TrainingSample(
                    trajectory_id=f"{generated.task.id}/{sibling}",
                    ages=np.where(loss_mask, 0, -1),
                    token_ids=np.array(ids),
                    loss_mask=loss_mask,
                    rollout_logprobs=np.where(loss_mask, np.float32(-1), np.float32(0)),
                    advantages=np.where(loss_mask, np.float32(sibling % 2 - 0.5), np.float32(0)),
                    turn_ids=np.where(loss_mask, 0, -1),
                    grammar_spans=tuple(spans),
                    temperature=1.0,
                )
            )
    return samples


def useful_flops(learner: Learner, samples: list[TrainingSample]) -> float:
    row = pack(samples)
    num_tokens = len(row.token_ids)
    contexts = {int(n[t - 1]) for n, s in zip(row.node_of, samples, strict=True) for t in np.nonzero(s.loss_mask)[0]}
    config = learner.policy.model.config
    named = dict(learner.policy.model.named_parameters())
    base = sum(p.numel() for n, p in named.items() if p.ndim == 2 and "lora" not in n and "embed" not in n)
    lora = sum(p.numel() for n, p in named.items() if "lora" in n)
    head = config.vocab_size * config.hidden_size
    base -= head if any("lm_head" in name for name in named) else 0
    attention = 2 * 2 * config.num_attention_heads * 64 * int((row.positions + 1).sum()) * config.num_hidden_layers
    linear = num_tokens * (2 * 2 * base + 3 * 2 * lora)
    return linear + 3 * attention + 2 * 2 * head * len(contexts)


def main() -> None:
    num_threads = os.cpu_count() or 1
    if not (environment := training_env(num_threads, "cpu")).items() <= os.environ.items():
        # As in the learner's actor: an allocator and a thread pool read these when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)
    torch.set_num_threads(num_threads)
    config = load_run_config(DEFAULT_RECIPE)
    learner = unguarded_learner(config)
    samples = sibling_samples(ChatFormat(learner.policy.tokenizer))
    batch = build_batch(samples, microbatch_tokens=config.learner.microbatch_tokens)
    flops = sum(useful_flops(learner, list(rows)) for rows in batch.microbatches)
    learner.train_step(batch)
    seconds = min(learner.train_step(batch).metrics["learner/step_s"] for _ in range(4))
    peak = matrix_peak(getattr(torch, config.learner.precision))
    distinct = sum(len(pack(rows).token_ids) for rows in batch.microbatches)
    print(
        f"{distinct} distinct tokens of {sum(len(s.token_ids) for s in samples)} in {seconds:.2f} s: "
        f"{distinct / seconds:.0f} tok/s"
    )
    print(
        f"learner {flops / seconds / 1e9:.0f} GFLOP/s, {config.learner.precision} matrix peak {peak / 1e9:.0f}: "
        f"{flops / seconds / peak:.0%} (target 40%)"
    )


if __name__ == "__main__":
    main()
