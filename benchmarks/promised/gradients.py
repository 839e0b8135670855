"""Gradients: what reaches the adapter is what the loss says, and every group that trains has one."""

import random
from itertools import product
from typing import get_args

import torch

from benchmarks.promised.promise import Measured, Promise
from configs.learner import FilterOverlongConfig, LearnerConfig, NoOverlongConfig, SoftOverlongConfig
from configs.reward import Credit
from envs.types import Task
from learner.credit import group_samples, turn_advantages
from learner.policy import TokenLogprobs
from reward.judging import OutcomeReward
from rollout.types import Completion, Group, StepScores, StopReason, Trajectory, Turn
from tests.changed import replace

BANDS = ((0.5, 0.98), (0.98, 0.998), (0.998, 0.9999), (0.9999, 1.0))
"""Of the probability of the token that is trained."""
LARGEST_ERROR = 0.1
"""Relative. The logits are bf16: one of 22 is off by up to 0.0625, and 1 - p by as large a share of itself."""


def _confident_tokens(seed: int) -> Measured:
    """A random bf16 head, and contexts that each lean to a token of their own; the largest error of each band."""
    generator = torch.Generator().manual_seed(seed)
    head = (torch.randn(4096, 576, generator=generator) * 0.05).bfloat16()
    tokens = torch.randint(len(head), (512,), generator=generator)
    contexts = torch.arange(len(tokens))
    rows = head[tokens].float()
    pull = torch.linspace(5, 22, len(tokens))[:, None] * rows / rows.norm(dim=1, keepdim=True) ** 2
    hidden = (torch.randn(pull.shape, generator=generator) + pull).bfloat16().requires_grad_()
    TokenLogprobs.apply(hidden, head, torch.ones(len(tokens)), lambda *_: None, contexts, tokens, 64).sum().backward()
    probabilities = (hidden.detach().double() @ head.double().T).softmax(1)
    true = head[tokens].double() - probabilities @ head.double()
    errors = (hidden.grad.double() - true).norm(dim=1) / true.norm(dim=1)
    chosen = probabilities[contexts, tokens]
    largest = [errors[(chosen >= low) & (chosen < high)].max().item() for low, high in BANDS]
    shown = ", ".join(
        f"p in [{low:g}, {high:g}): {error:.3f}" for (low, high), error in zip(BANDS, largest, strict=True)
    )
    return Measured(f"largest relative error, {shown}", holds=max(largest) < LARGEST_ERROR)


MAX_TURN_TOKENS = 12
TASK = Task(id="t", dataset="arith", question="6*7?", answer="42")


def _signal(seed: int) -> Measured:
    """Random groups, right, wrong, cut and broken attempts among them; those that are taken into a batch, and how many
    of these have no sample with an advantage."""
    rng = random.Random(seed)
    ready = empty = 0
    overlong_rules = (NoOverlongConfig(), SoftOverlongConfig(cache_tokens=6), FilterOverlongConfig())
    for overlong, credit, _ in product(overlong_rules, get_args(Credit), range(500)):
        config = LearnerConfig(overlong=overlong)
        attempts = tuple(_attempt(index, rng) for index in range(rng.randint(1, 6)))
        group = Group(id="g", trajectories=attempts)
        scored = OutcomeReward(config, max_turn_tokens=MAX_TURN_TOKENS).score_group(group)
        raw = tuple(tuple(rng.random() for _ in one.planner_turns) for one in attempts)
        scored = replace(scored, step_scores=StepScores(raw=raw, prm_digest="random"))
        if scored.ending == "ready":
            samples = group_samples(scored, turn_advantages(scored, credit=credit, prm_weight=0.5), temperature=1.0)
            ready += 1
            empty += not any(one.advantages[one.loss_mask].any() for one in samples)
    return Measured(f"{empty} of {ready} groups with signal have no advantage", holds=ready > 500 and not empty)


def _attempt(index: int, rng: random.Random) -> Trajectory:
    stop_reason: StopReason = "infrastructure" if rng.random() < 0.1 else "answered"
    num_tokens = rng.choice((1, MAX_TURN_TOKENS // 2, MAX_TURN_TOKENS))
    completion = Completion(
        token_ids=(5,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        text="x",
        finish_reason="length" if num_tokens == MAX_TURN_TOKENS else "stop",
        policy_version=0,
    )
    turn = Turn.of(role="planner", prompt_token_ids=(1, 2), completion=completion, trainable=True)
    answer = rng.choice(("42", "41"))
    return Trajectory(id=f"g/{index}", group_id="g", task=TASK, turns=(turn,), answer=answer, stop_reason=stop_reason)


PROMISES = [
    Promise(
        name="confident-tokens",
        said="A token keeps its gradient in bf16 however confident the policy is of it",
        where="docs/algorithms.md",
        measure=_confident_tokens,
    ),
    Promise(
        name="signal",
        said="Every group that is trained has an advantage that is not zero, under every overlong rule and credit",
        where="docs/invariants.md",
        measure=_signal,
    ),
]
