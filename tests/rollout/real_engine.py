"""The demo model's learner and adapters of any size, and what to ask of the real engine."""

import asyncio

from rollout.engine import GenerationRequest

RANK, SCALE = 16, 2.0
"""Those of `ModelConfig()`, which the learner has."""


def build_learner(model_path):
    from configs.learner import LearnerConfig
    from configs.model import ModelConfig
    from learner.learner import Learner

    return Learner(model_path, ModelConfig(), LearnerConfig(), off_policy=True, seed=0)


def build_engine(model_path, *, lora_rank=RANK, **config):
    from configs.rollout import EngineConfig
    from rollout.vllm_engine import VllmEngine

    return VllmEngine(model_path, EngineConfig(**config), lora_rank=lora_rank, lora_scale=SCALE, seed=0)


def make_adapter(learner, version, *, size=0.15):
    """An adapter of its own for every version, and the learner's canary with it."""
    import torch

    generator = torch.Generator().manual_seed(version)
    for name, parameter in learner.policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data = size * torch.randn(parameter.shape, generator=generator)
    learner.policy_version = version
    return learner.adapter()


def learner_logprobs(learner, adapter, prompt, completion):
    """What the learner says of a completion's tokens with an adapter (None: with the base model)."""
    import torch

    from learner.samples import scoring_sample

    sample = scoring_sample((*prompt, *completion.token_ids))
    if adapter is not None:
        learner.load_adapter(adapter)
    with torch.no_grad():
        if adapter is None:
            with learner.policy.without_adapter():
                row = learner.policy.logprobs([sample])[0]
        else:
            row = learner.policy.logprobs([sample])[0]
    return row[len(prompt) :].tolist()


def mean_gap(one, other):
    return sum(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True)) / len(one)


def request(prompt, **changes):
    return GenerationRequest(
        **{"trajectory_id": "t", "prompt_token_ids": tuple(prompt), "max_tokens": 16, "temperature": 0.0} | changes
    )


async def until_sampled(engine, num_tokens, num_requests=1):
    """Wait until so many open requests have sampled so many tokens."""
    while True:
        running = list(engine._scheduler.running)
        if sum(one.num_output_tokens >= num_tokens for one in running) >= num_requests:
            return
        await asyncio.sleep(0.005)


async def in_engine_thread(engine, work):
    return await asyncio.wrap_future(engine._commands.submit(work))
