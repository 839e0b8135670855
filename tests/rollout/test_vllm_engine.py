"""The real engine in merged mode, with the demo model."""

import asyncio
import hashlib

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
    request,
    sampling_requests,
    small_step,
)

pytestmark = pytest.mark.slow

PLACES = 16


@pytest.fixture(scope="module")
def adapters(learner):
    return [make_adapter(learner, version) for version in range(3)]


@pytest.fixture(scope="module")
def merged(model_path):
    engine = build_engine(model_path, max_num_seqs=PLACES)
    yield engine
    engine.close()


@pytest.fixture
async def engine(merged):
    """Reset the engine to the base model and an empty cache."""
    await load_base(merged)
    return merged


# Adapters that are loaded while requests run.


async def completions_around(engine, requests, adapter):
    """Load an adapter as soon as the requests have all sampled 15 tokens."""
    completions, _ = await asyncio.gather(
        engine.generate_together(requests), load_after(engine, 15, len(requests), adapter)
    )
    return completions


@pytest.mark.usefixtures("endless")
async def test_running_requests_continue_with_new_weights_from_a_prefix_that_is_computed_again(
    engine, learner, adapters, prompt
):
    old, new, _ = adapters
    requests = sampling_requests([prompt] * 3)
    await load(engine, old)
    undisturbed = await engine.generate_together(requests)
    await load_base(engine)
    await load(engine, old)
    completions = await completions_around(engine, requests, new)
    for asked, one, whole in zip(requests, completions, undisturbed, strict=True):
        ((at, switched_to),) = one.switches
        assert (one.policy_version, switched_to) == (0, 1)
        assert 15 <= at < 20
        # The tokens before the switch are those of an undisturbed run.
        assert (one.token_ids[:at], one.logprobs[:at]) == (whole.token_ids[:at], whole.logprobs[:at])
        assert one.token_ids != whole.token_ids
        for adapter, own, foreign in ((old, slice(at), slice(at, 40)), (new, slice(at, 40), slice(at))):
            expected = learner_logprobs(learner, adapter, asked, one)
            assert mean_gap(one.logprobs[own], expected[own]) < ROUNDING
            assert mean_gap(one.logprobs[foreign], expected[foreign]) > OTHER_WEIGHTS


@pytest.mark.usefixtures("endless")
async def test_cached_prefix_of_old_weights_is_not_used_with_new_ones(engine, learner, adapters, prompt):
    old, new, _ = adapters
    asked = request(prompt, temperature=1.0, seed=0)
    await load(engine, old)
    await engine.generate(asked)
    # The prompt is cached now.
    await load(engine, new)
    one = await engine.generate(asked)
    assert mean_gap(one.logprobs, learner_logprobs(learner, new, asked, one)) < ROUNDING
    assert mean_gap(one.logprobs, learner_logprobs(learner, old, asked, one)) > OTHER_WEIGHTS


async def test_grammar_continues_across_an_update(engine, adapters, prompt):
    endless_grammar = "root ::= [a-z ] root"
    await load(engine, adapters[0])
    (one,) = await completions_around(engine, sampling_requests([prompt], grammar=endless_grammar), adapters[1])
    assert one.switches
    assert len(one.token_ids) == 40
    assert set(one.text) <= set("abcdefghijklmnopqrstuvwxyz ")


# Loading and its proof.


async def test_weights_read_back_prove_the_smallest_step(engine, adapters):
    old = adapters[0]
    assert await load(engine, old) == old.digest == hashlib.sha256(old.data).hexdigest()
    first = await engine.read_back()
    await engine.load_adapter(1, small_step(old, 1))
    second = await engine.read_back()
    assert (first.fault, second.fault) == (None, None)
    assert first.held != second.held
    await load_base(engine)
    assert (await engine.read_back()).fault is None


async def test_weights_that_did_not_reach_the_layers_are_found_in_memory(engine, adapters, monkeypatch):
    await load(engine, adapters[0])
    with monkeypatch.context() as patched:
        patched.setattr(engine._llm, "collective_rpc", without_reload(engine._llm.collective_rpc))
        await engine.load_adapter(1, small_step(adapters[0], 1))
        fault = (await engine.read_back()).fault
    assert fault


def without_reload(rpc):
    """Return an RPC that reads new weights and discards them."""

    def called(method, *arguments, **options):
        if method == "reload_weights":
            return [list(options["kwargs"]["weights_iterator"]) and None]
        return rpc(method, *arguments, **options)

    return called
