"""The real engine with versioned LoRA adapters, the GPU's way, proven here on the CPU build with the demo model."""

import asyncio

import pytest
from real_engine import (
    OTHER_WEIGHTS,
    ROUNDING,
    build_engine,
    learner_logprobs,
    load,
    load_after,
    load_base,
    make_adapter,
    mean_gap,
    sampling_requests,
    small_step,
)

from rollout.engines.base_weights import BaseWeights

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
    """Reset the engine to the base model."""
    await load_base(native)
    return native


def folders_of(engine):
    """Return the folders of all adapters that have files."""
    return [*engine._native._files.path.iterdir()]


@pytest.mark.usefixtures("endless")
async def test_running_requests_keep_their_adapter_and_later_ones_use_the_new(engine, learner, adapters, prompt):
    old, new, last, _ = adapters
    await load(engine, old)
    running = asyncio.create_task(engine.generate_together(sampling_requests([prompt] * 2, max_tokens=20)))
    await asyncio.sleep(0)
    # The prompt is in the cache, computed with the old adapter.
    await load_after(engine, 3, 2, new)
    (asked,) = sampling_requests([prompt], max_tokens=10)
    fresh = await engine.generate(asked)
    for one, own, foreign in ((fresh, new, old), *((one, old, new) for one in await running)):
        assert (one.policy_version, one.switches) == (own.policy_version, ())
        assert mean_gap(one.logprobs, learner_logprobs(learner, own, asked, one)) < ROUNDING
        assert mean_gap(one.logprobs, learner_logprobs(learner, foreign, asked, one)) > OTHER_WEIGHTS
    assert sorted(folder.name[:3] for folder in folders_of(engine)) == ["v0-", "v1-"]
    await load(engine, last)
    assert [folder.name[:3] for folder in folders_of(engine)] == ["v2-"]
    assert len(engine._llm.list_loras()) == 1


async def test_read_back_of_the_slots_proves_the_smallest_step(engine, adapters):
    old = adapters[0]
    await load(engine, old)
    first = await engine.read_back()
    await engine.load_adapter(1, small_step(old, 1))
    second = await engine.read_back()
    assert (first.fault, second.fault) == (None, None)
    assert first.held != second.held
    # The folder of version 1 now differs from the slots.
    (folder,) = [one for one in folders_of(engine) if one.name.startswith("v1-")]
    (folder / "adapter_model.safetensors").write_bytes(old.data)
    stale = await engine.read_back()
    assert (stale.given, stale.held) == (first.given, second.held)
    assert stale.fault


async def test_engine_on_the_shared_base_samples_the_same_bits_as_one_with_its_own(
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
            before = await one.generate_together(asked)
            await load(one, adapter)
            answers.append((before, await one.generate_together(asked)))
        assert answers[0] == answers[1]
    finally:
        shared.close()
