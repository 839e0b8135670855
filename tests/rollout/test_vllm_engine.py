"""The real engine with the demo model."""

import asyncio

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_path():
    from learner.demo_model import ensure_demo_model

    return ensure_demo_model()


@pytest.fixture(scope="module")
def engine(model_path):
    from configs.rollout import EngineConfig
    from rollout.vllm_engine import VllmEngine

    engine = VllmEngine(model_path, EngineConfig(max_num_seqs=16), lora_rank=4, lora_scale=2.0, seed=0)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompt(model_path):
    from rollout.building import build_chat

    return build_chat(model_path).prompt("You are helpful.", "What is 2 + 3?")


def adapter_bytes(model_path, size=0.05):
    """An adapter on the query projections that changes what is generated."""
    import json

    import safetensors.torch
    import torch

    config = json.loads((model_path / "config.json").read_text())
    hidden, tensors = config["hidden_size"], {}
    generator = torch.Generator().manual_seed(0)
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = size * torch.randn(4, hidden, generator=generator)
        tensors[f"{name}.lora_B.weight"] = size * torch.randn(hidden, 4, generator=generator)
    return safetensors.torch.save(tensors)


def request(prompt, **changes):
    from rollout.engine import GenerationRequest

    return GenerationRequest(
        **{"trajectory_id": "t", "prompt_token_ids": prompt, "max_tokens": 16, "temperature": 0.0} | changes
    )


async def test_weight_sync_changes_generation_and_the_base_comes_back_exactly(engine, model_path, prompt):
    import hashlib

    before = await engine.generate(request(prompt))
    data = adapter_bytes(model_path)
    digest = await engine.load_adapter(5, data)
    assert digest == hashlib.sha256(data).hexdigest()
    changed = await engine.generate(request(prompt))
    assert changed.policy_version == engine.policy_version == 5
    assert changed.logprobs != before.logprobs
    await engine.load_base()
    after = await engine.generate(request(prompt))
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


async def test_completion_never_mixes_two_versions(engine, model_path, prompt):
    running = asyncio.create_task(engine.generate(request(prompt, max_tokens=40, temperature=1.0)))
    await asyncio.sleep(0.2)
    await engine.load_adapter(6, adapter_bytes(model_path))
    assert running.done()
    assert (await running).policy_version == -1
    await engine.load_base()


async def test_grammar_binds_what_is_sampled_and_logprobs_are_after_it(engine, prompt):
    from rollout.decision import parse_decision, planner_grammar

    completion = await engine.generate(
        request(prompt, grammar=planner_grammar(("answer",)), max_tokens=60, temperature=1.0)
    )
    assert completion.text.startswith('{"thought":"')
    if completion.finish_reason == "stop":
        assert parse_decision(completion.text).action == "answer"
    assert all(logprob <= 0 for logprob in completion.logprobs)
    assert len(completion.logprobs) == len(completion.token_ids)


async def test_released_trajectory_no_longer_occupies_the_engine(engine, prompt):
    from rollout.engine import EngineError

    running = asyncio.create_task(engine.generate(request(prompt, trajectory_id="gone", max_tokens=900)))
    await asyncio.sleep(0.3)
    engine.release("gone")
    with pytest.raises(EngineError, match="released"):
        await asyncio.wait_for(running, 10)


async def test_frozen_weights_cannot_be_asked_of_a_merged_engine(engine, prompt):
    from rollout.engine import EngineError

    with pytest.raises(EngineError, match="frozen"):
        await engine.generate(request(prompt, use_adapter=False))


async def test_prompt_that_does_not_fit_is_the_callers_error(engine):
    with pytest.raises(ValueError, match="refused the request"):
        await engine.generate(request((5,) * 5000))
