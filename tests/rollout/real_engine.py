"""The demo model's engine and learner, adapters that change the samples, and requests."""

import asyncio

from rollout.engines.engine import BASE_VERSION, GenerationRequest
from rollout.model_files import weights_in

ROUNDING = 0.2
"""Mean difference in nats that bfloat16 makes between learner and engine; 0.06 to 0.11 is usual with these adapters."""

OTHER_WEIGHTS = 0.8
"""Log-probs under other weights differ by more; 1.3 to 3.7 is usual."""


def build_learner(model_path):
    from configs.learner import LearnerConfig, ModelConfig
    from learner.learner import Learner

    return Learner(model_path, ModelConfig(), LearnerConfig(), seed=0)


def build_engine(model_path, base=None, **config):
    from configs.learner import ModelConfig
    from configs.rollout import EngineConfig
    from rollout.engines.vllm import VllmEngine

    return VllmEngine(model_path, EngineConfig(**config), ModelConfig(), seed=0, base=base)


def make_adapter(learner, version, size=0.15):
    """Return an adapter that depends only on the version."""
    import torch

    generator = torch.Generator().manual_seed(version)
    for name, parameter in learner.policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data = size * torch.randn(parameter.shape, generator=generator)
    learner.policy_version = version
    return learner.adapter()


def small_step(adapter, version, size=1e-6):
    """Return the adapter after an optimizer step of this size: every weight moves by it, up or down."""
    import safetensors.torch
    import torch

    generator = torch.Generator().manual_seed(version)
    tensors = safetensors.torch.load(adapter.data)
    return safetensors.torch.save(
        {name: one + size * torch.randn(one.shape, generator=generator).sign() for name, one in tensors.items()}
    )


async def load(engine, adapter):
    return await engine.load_adapter(adapter.policy_version, adapter.data)


async def load_after(engine, num_tokens, num_requests, adapter):
    """Load an adapter as soon as `num_requests` running requests have sampled `num_tokens` each.

    The engine's thread steps and loads in one command, so that no request ends before however slow the test is.
    """
    load_now = await engine.prepare_adapter(adapter.policy_version, adapter.data)

    def step_and_load():
        while sum(one.num_output_tokens >= num_tokens for one in engine._scheduler.running) < num_requests:
            assert engine._open
            engine._step()
        load_now()

    await asyncio.wrap_future(engine._commands.submit(step_and_load))


async def load_base(engine):
    """Finish the open requests and sample with the untouched model again."""

    def unload():
        while engine._open:
            engine._step()
        if engine._native is None:
            base = ((name, tensors.get_tensor(name)) for name, tensors in weights_in(engine._merger._model_path))
            engine._reload(base, BASE_VERSION)
        else:
            engine._native.drop_unused(set())
        engine.policy_version = BASE_VERSION

    await asyncio.wrap_future(engine._commands.submit(unload))


def learner_logprobs(learner, adapter, asked, completion):
    """Return the learner's log-probs of a completion's tokens with an adapter."""
    import torch

    from learner.packing import scoring_sample

    learner.load_adapter(adapter)
    with torch.no_grad():
        row = learner.policy.logprobs([scoring_sample((*asked.prompt_token_ids, *completion.token_ids))])[0]
    return row[len(asked.prompt_token_ids) :].tolist()


def mean_gap(one, other):
    return sum(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True)) / len(one)


def request(prompt, **changes):
    return GenerationRequest(
        **{"trajectory_id": "t", "prompt_token_ids": tuple(prompt), "max_tokens": 16, "temperature": 0.0} | changes
    )


def sampling_requests(prompts, **changes):
    """Return one request per prompt, each with another seed."""
    return [
        request(prompt, seed=index, trajectory_id=f"t{index}", **{"temperature": 1.0, "max_tokens": 40} | changes)
        for index, prompt in enumerate(prompts)
    ]


def without_ends(monkeypatch):
    """Let every completion reach its token limit."""
    from rollout.engines import vllm as vllm_engine

    sampling_params = vllm_engine.sampling_params

    def endless(*asked):
        params = sampling_params(*asked)
        params.ignore_eos = True
        return params

    monkeypatch.setattr(vllm_engine, "sampling_params", endless)
