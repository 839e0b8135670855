"""The real engine with versioned LoRA adapters, the GPU's way, proven here on the CPU build with the demo model."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from real_engine import (
    OTHER_WEIGHTS,
    ROUNDING,
    build_engine,
    generate_from_cache,
    in_engine_thread,
    learner_logprobs,
    load,
    make_adapter,
    mean_gap,
    request,
    sampling_requests,
    small_step,
    until_sampled,
)

from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines.base_weights import BaseWeights
from rollout.engines.engine import EngineError
from rollout.engines.vllm_parts import _register_loader, engine_options

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapters(learner):
    return [make_adapter(learner, version) for version in range(4)]


@pytest.fixture(scope="module")
def native(model_path):
    engine = build_engine(model_path, adapter_mode="native", max_num_seqs=8)
    yield engine
    engine.close()


@pytest.fixture
async def engine(native):
    """With the base model only."""
    await native.load_base()
    return native


def folders_of(engine):
    """Of the adapters that have files."""
    return [folder for place in engine._native._places for folder in place.path.iterdir()]


async def versions_held(engine):
    """By vLLM, and on disk. They must be the same."""
    numbers = {held.lora_int_id: version for version, held in engine._native._held.items()}
    in_vllm = await in_engine_thread(engine, engine._llm.list_loras)
    on_disk = {folder.name.split("-")[0] for folder in folders_of(engine)}
    assert {f"v{numbers[number]}" for number in in_vllm} == on_disk
    return {numbers[number] for number in in_vllm}


@pytest.mark.usefixtures("endless")
async def test_running_requests_keep_their_adapter_and_new_ones_take_the_new(engine, learner, adapters, prompt):
    old, new, _, _ = adapters
    await load(engine, old)
    running = asyncio.create_task(engine.generate_together(sampling_requests([prompt] * 2, max_tokens=20)))
    await until_sampled(engine, 3, 2)
    # The prompt is in the cache, computed with the old adapter.
    await load(engine, new)
    assert not running.done()
    (asked,) = sampling_requests([prompt], max_tokens=10)
    fresh = await engine.generate(asked)
    for one, own, foreign in ((fresh, new, old), *((one, old, new) for one in await running)):
        assert (one.policy_version, one.switches) == (own.policy_version, ())
        assert mean_gap(one.logprobs, learner_logprobs(learner, own, asked, one)) < ROUNDING
        assert mean_gap(one.logprobs, learner_logprobs(learner, foreign, asked, one)) > OTHER_WEIGHTS


async def test_the_frozen_base_stays_beside_the_adapters(engine, adapters, prompt):
    before = await generate_from_cache(engine, request(prompt))
    await load(engine, adapters[0])
    changed = await engine.generate(request(prompt))
    frozen = await engine.generate(request(prompt, use_adapter=False))
    assert (before.policy_version, changed.policy_version, frozen.policy_version) == (-1, 0, -1)
    assert (frozen.token_ids, frozen.logprobs) == (before.token_ids, before.logprobs)
    assert changed.logprobs != before.logprobs


@pytest.mark.usefixtures("endless")
async def test_unused_adapters_leave_vllm_and_shared_memory_and_those_in_use_never(engine, adapters, prompt):
    assert await versions_held(engine) == set()
    await load(engine, adapters[0])
    running = asyncio.create_task(engine.generate(request(prompt, max_tokens=25)))
    await until_sampled(engine, 1)
    for newest in (1, 2):
        await load(engine, adapters[newest])
        assert not running.done()
        assert await versions_held(engine) == {0, newest}
    assert (await running).policy_version == 0
    await load(engine, adapters[3])
    assert await versions_held(engine) == {3}


async def test_weights_read_back_out_of_the_slots_prove_the_smallest_step(engine, adapters):
    old = adapters[0]
    await load(engine, old)
    first = await engine.read_back()
    await engine.load_adapter(1, small_step(old, 1))
    second = await engine.read_back()
    assert (first.fault, second.fault) == (None, None)
    assert first.held != second.held
    # The folder of version 1 now says what the slots do not hold.
    (folder,) = [one for one in folders_of(engine) if one.name.startswith("v1-")]
    (folder / "adapter_model.safetensors").write_bytes(old.data)
    stale = await engine.read_back()
    assert (stale.given, stale.held) == (first.given, second.held)
    assert "the engine's memory holds weights" in stale.fault


async def test_adapter_rounded_by_the_learner_is_the_one_that_the_engine_would_make_of_it(engine, learner):
    exact = make_adapter(learner, 0)
    rounded = learner.adapter(engine._config.adapter_precision)
    await load(engine, exact)
    given_exact = await engine.read_back()
    await engine.load_adapter(1, rounded.data)
    given_rounded = await engine.read_back()
    assert (given_exact.fault, given_rounded.fault) == (None, None)
    assert given_rounded.held == given_exact.held


async def test_version_that_is_not_newer_is_refused(engine, adapters, prompt):
    await load(engine, adapters[1])
    for version in (1, 0):
        with pytest.raises(ValueError, match=f"adapter version {version} is not newer than 1"):
            await engine.load_adapter(version, adapters[2].data)
    assert (await engine.generate(request(prompt, max_tokens=2))).policy_version == 1
    assert await versions_held(engine) == {1}


async def test_version_that_comes_again_after_the_base_is_not_taken_for_the_one_before(
    engine, learner, adapters, prompt
):
    asked = request(prompt, temperature=1.0, seed=0)
    await load(engine, adapters[0])
    await engine.generate(asked)
    await engine.load_base()
    await engine.load_adapter(0, adapters[1].data)
    one = await engine.generate(asked)
    assert mean_gap(one.logprobs, learner_logprobs(learner, adapters[1], asked, one)) < ROUNDING
    assert mean_gap(one.logprobs, learner_logprobs(learner, adapters[0], asked, one)) > OTHER_WEIGHTS


async def test_an_engine_on_the_shared_base_samples_and_scores_bit_for_bit_like_one_with_its_own(
    engine, model_path, adapters, prompt
):
    _, adapter, _, _ = adapters
    asked = sampling_requests([prompt], max_tokens=12)
    base = BaseWeights(model_path, device="cpu", precision=engine._config.precision)
    shared = build_engine(model_path, adapter_mode="native", max_num_seqs=8, base=base.export())
    base.close()
    try:
        answers = []
        for one in (engine, shared):
            before = await one.score(prompt)
            await load(one, adapter)
            answers.append((before, await one.score(prompt), await one.generate_together(asked)))
        assert answers[0] == answers[1]
    finally:
        shared.close()


def test_a_card_that_the_holder_has_filled_is_still_started_on():
    """An A40's memory, of which the base weights of 8B parameters are another process's."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.v1.worker.utils import request_memory

    base = {"weight": torch.empty(8_190_735_360, dtype=torch.bfloat16, device="meta")}
    loader = get_model_loader(LoadConfig(load_format=_register_loader(base)))
    options = engine_options(EngineConfig(device="cuda", adapter_mode="native"), ModelConfig())
    card = SimpleNamespace(total_memory=44 << 30, free_memory=20 << 30, device_="cuda:0")
    asked = SimpleNamespace(gpu_memory_utilization=options["gpu_memory_utilization"])
    assert request_memory(card, asked, loader.get_external_weight_memory(None)) < card.free_memory


def test_closed_engine_leaves_nothing_in_shared_memory(native):
    roots = [place.path for place in native._native._places]
    assert roots
    assert all(root.exists() for root in roots)
    native.close()
    assert not any(root.exists() for root in roots)


async def test_closed_engine_refuses_instead_of_letting_wait(native, prompt):
    native.close()
    native.close()
    native.release("t0")
    with pytest.raises(EngineError, match="the engine is closed"):
        await native.generate_together(sampling_requests([prompt], max_tokens=2))
    assert native.failure is None
