"""The real engine in merged mode, with the demo model."""

import asyncio
import hashlib
import threading

import pytest
from real_engine import (
    OTHER_WEIGHTS,
    ROUNDING,
    build_engine,
    engine_logprobs,
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

from rollout.engines.engine import EngineError
from rollout.engines.vllm_parts import FUSED
from rollout.types import VersionSwitch

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
    """With the base model and an empty cache."""
    await merged.load_base()
    return merged


# An adapter that comes while requests run.


async def completions_around(engine, requests, *adapters, every=15):
    """The completions of requests that have all sampled so many more tokens whenever an adapter comes."""
    running = asyncio.create_task(engine.generate_together(requests))
    for index, adapter in enumerate(adapters):
        await until_sampled(engine, every * (index + 1), len(requests))
        await load(engine, adapter)
        assert not running.done()
    return await running


@pytest.mark.usefixtures("endless")
async def test_running_requests_go_on_with_newer_weights_from_a_prefix_that_is_computed_anew(
    engine, learner, adapters, prompt
):
    old, new, _ = adapters
    requests = sampling_requests([prompt] * 3)
    await load(engine, old)
    undisturbed = await engine.generate_together(requests)
    await engine.load_base()
    await load(engine, old)
    completions = await completions_around(engine, requests, new)
    for asked, one, whole in zip(requests, completions, undisturbed, strict=True):
        (switch,) = one.switches
        at = switch.index
        assert (one.policy_version, switch.policy_version) == (0, 1)
        assert one.token_versions == (0,) * at + (1,) * (40 - at)
        assert 15 <= at < 40
        # What was sampled before is what would have been sampled anyway.
        assert (one.token_ids[:at], one.logprobs[:at]) == (whole.token_ids[:at], whole.logprobs[:at])
        assert one.token_ids != whole.token_ids
        for adapter, own, foreign in ((old, slice(at), slice(at, 40)), (new, slice(at, 40), slice(at))):
            said = learner_logprobs(learner, adapter, asked, one)
            assert mean_gap(one.logprobs[own], said[own]) < ROUNDING
            assert mean_gap(one.logprobs[foreign], said[foreign]) > OTHER_WEIGHTS
        # Keys and values of the old weights, of which the learner knows nothing, would be far from what the engine
        # itself says without any cache.
        assert mean_gap(one.logprobs[at:], (await engine_logprobs(engine, asked, one))[at:]) < ROUNDING


@pytest.mark.usefixtures("endless")
async def test_every_update_during_a_completion_is_noted(engine, adapters, prompt):
    await load(engine, adapters[0])
    (one,) = await completions_around(engine, sampling_requests([prompt], max_tokens=60), *adapters[1:])
    first, second = one.switches
    assert (first.policy_version, second.policy_version) == (1, 2)
    assert 15 <= first.index < second.index < 60
    assert set(one.token_versions) == {0, 1, 2}


@pytest.mark.usefixtures("endless")
async def test_request_that_has_not_sampled_yet_is_wholly_of_the_newer_version(engine, adapters, prompt):
    await load(engine, adapters[0])
    requests = sampling_requests([prompt] * (PLACES + 2), max_tokens=40)
    completions = await asyncio.gather(engine.generate_together(requests), updated_after(engine, 3, adapters[1]))
    started, waiting = completions[0][:PLACES], completions[0][PLACES:]
    assert {one.policy_version for one in started} == {0}
    assert all(one.switches for one in started)
    assert [(one.policy_version, one.switches) for one in waiting] == [(1, ())] * 2


async def updated_after(engine, num_tokens, adapter):
    await until_sampled(engine, num_tokens)
    await load(engine, adapter)


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


@pytest.mark.parametrize("endless_grammar", ["root ::= [a-z ] root"])
async def test_grammar_goes_on_where_it_was_when_an_adapter_comes(engine, adapters, prompt, endless_grammar):
    await load(engine, adapters[0])
    (one,) = await completions_around(engine, sampling_requests([prompt], grammar=endless_grammar), adapters[1])
    assert one.switches
    assert len(one.token_ids) == 40
    assert set(one.text) <= set("abcdefghijklmnopqrstuvwxyz ")


# What is refused.


async def test_version_that_is_not_newer_is_refused_and_nothing_changes(engine, adapters, prompt):
    await load(engine, adapters[1])
    before = await generate_from_cache(engine, request(prompt))
    for version in (1, 0, -1):
        with pytest.raises(ValueError, match=f"adapter version {version} is not newer than 1, which is loaded"):
            await engine.load_adapter(version, adapters[2].data)
    after = await engine.generate(request(prompt))
    assert (engine.policy_version, after.policy_version) == (1, 1)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


def with_other_tensors(adapter, change):
    import safetensors.torch

    return safetensors.torch.save(change(safetensors.torch.load(adapter.data)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: {name: one for name, one in tensors.items() if "3.mlp.up_proj.lora_B" not in name}, "lacks"),
        (lambda tensors: {name.replace("mlp", "moe"): one for name, one in tensors.items()}, "the base model lacks"),
    ],
)
async def test_adapter_of_another_model_is_refused_before_any_weight_is_replaced(
    engine, adapters, prompt, change, complaint
):
    await load(engine, adapters[0])
    before = await generate_from_cache(engine, request(prompt))
    with pytest.raises(ValueError, match=complaint):
        await engine.load_adapter(1, with_other_tensors(adapters[1], change))
    with pytest.raises(ValueError, match="these bytes are no adapter"):
        await engine.load_adapter(1, adapters[1].data[:5000])
    after = await engine.generate(request(prompt))
    assert (after.policy_version, after.token_ids, after.logprobs) == (0, before.token_ids, before.logprobs)
    assert engine.failure is None


async def test_request_that_vllm_refuses_is_the_callers_error(engine, prompt):
    for asked in (request((5,) * 5000), request(prompt, max_tokens=0), request(prompt, temperature=-1.0)):
        with pytest.raises(ValueError, match="refused the request"):
            await asyncio.wait_for(engine.generate(asked), 60)
    assert len((await engine.generate(request(prompt, max_tokens=2))).token_ids) == 2


async def test_frozen_weights_cannot_be_asked_of_a_merged_engine(engine, prompt):
    with pytest.raises(EngineError, match="frozen"):
        await engine.generate(request(prompt, use_adapter=False))


# What is loaded, and its proof.


async def test_update_changes_what_is_sampled_and_the_base_comes_back_exactly(engine, adapters, prompt):
    before = await engine.generate(request(prompt))
    digest = await load(engine, adapters[0])
    assert digest == adapters[0].digest == hashlib.sha256(adapters[0].data).hexdigest()
    changed = await engine.generate(request(prompt))
    assert changed.policy_version == engine.policy_version == 0
    assert changed.logprobs != before.logprobs
    await engine.load_base()
    after = await engine.generate(request(prompt))
    assert (after.policy_version, after.token_ids, after.logprobs) == (-1, before.token_ids, before.logprobs)


async def test_weights_read_back_prove_the_smallest_step(engine, adapters):
    old = adapters[0]
    await load(engine, old)
    first = await engine.read_back()
    await engine.load_adapter(1, small_step(old, 1))
    second = await engine.read_back()
    assert (first.fault, second.fault) == (None, None)
    assert first.held != second.held
    await engine.load_base()
    assert (await engine.read_back()).fault is None


async def test_weights_that_did_not_reach_the_layers_are_found_in_memory(engine, adapters, monkeypatch):
    await load(engine, adapters[0])
    with monkeypatch.context() as patched:
        patched.setattr(engine._llm, "collective_rpc", without_reload(engine._llm.collective_rpc))
        await engine.load_adapter(1, small_step(adapters[0], 1))
        fault = (await engine.read_back()).fault
    assert "the engine's memory holds weights" in fault


def without_reload(rpc):
    """The weights are taken and thrown away."""

    def called(method, *arguments, **options):
        if method == "reload_weights":
            return [list(options["kwargs"]["weights_iterator"]) and None]
        return rpc(method, *arguments, **options)

    return called


@pytest.mark.usefixtures("endless")
async def test_released_trajectory_no_longer_occupies_the_engine(engine, prompt):
    running = asyncio.create_task(engine.generate(request(prompt, trajectory_id="gone", max_tokens=800)))
    await until_sampled(engine, 1)
    engine.release("gone")
    with pytest.raises(EngineError, match="released"):
        await asyncio.wait_for(running, 60)


async def test_release_reaches_a_request_that_was_handed_over_just_before(engine, prompt):
    running = asyncio.create_task(engine.generate(request(prompt, trajectory_id="gone", max_tokens=800)))
    await asyncio.sleep(0)
    engine.release("gone")
    with pytest.raises(EngineError, match="released"):
        await asyncio.wait_for(running, 60)


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_what_vllm_gave_up_is_an_error_and_no_decision(reason, engine, prompt, monkeypatch):
    step = engine._llm.step

    def given_up():
        outputs = step()
        for output in outputs:
            output.outputs[0].finish_reason = reason
        return outputs

    monkeypatch.setattr(engine._llm, "step", given_up)
    with pytest.raises(EngineError, match=f"did not finish a request \\(finish_reason '{reason}'\\)"):
        await asyncio.wait_for(engine.generate(request(prompt, max_tokens=4)), 60)
    monkeypatch.undo()
    assert (await asyncio.wait_for(engine.generate(request(prompt, max_tokens=4)), 60)).token_ids


# The load.


def test_an_engine_on_a_cpu_is_told_to_use_the_kernels_for_norms(merged):
    """What they give is in test_fused_norms.py."""
    from vllm import ir

    assert ir.ops.rms_norm.get_priority() == ir.ops.fused_add_rms_norm.get_priority() == [FUSED, "native"]


@pytest.mark.usefixtures("endless")
async def test_load_tells_how_hard_the_engine_works(engine, prompt):
    idle = engine.load
    assert (idle.num_waiting, idle.kv_usage) == (0, 0)
    requests = sampling_requests([prompt] * (PLACES + 5), max_tokens=12)
    running = asyncio.create_task(engine.generate_together(requests))
    await until_sampled(engine, 2, PLACES)
    busy = engine.load
    assert busy.num_waiting == 5
    assert 0 < busy.kv_usage < 1
    assert busy.busy_s > idle.busy_s
    tokens = engine.sampled_tokens
    await running
    assert engine.sampled_tokens - tokens == 12 * len(requests)
    done = engine.load
    assert (done.num_waiting, done.kv_usage) == (0, 0)
    assert done.busy_s > busy.busy_s


@pytest.mark.usefixtures("endless")
async def test_preemptions_for_want_of_room_are_counted_and_those_of_an_update_are_not(engine, adapters, prompt):
    before = engine.load.num_preemptions
    (one,) = await completions_around(engine, sampling_requests([prompt]), adapters[0])
    assert one.switches == (VersionSwitch(index=one.switches[0].index, policy_version=0),)
    assert engine.load.num_preemptions == before

    def preempt():
        scheduler = engine._scheduler
        scheduler.prev_step_scheduled_req_ids.clear()
        scheduler._preempt_request(scheduler.running.pop(), 0.0)

    running = asyncio.create_task(engine.generate(*sampling_requests([prompt])))
    await until_sampled(engine, 5)
    await in_engine_thread(engine, preempt)
    assert len((await running).token_ids) == 40
    assert engine.load.num_preemptions == before + 1


@pytest.mark.usefixtures("endless")
async def test_pulse_tells_an_engine_that_computes_from_one_whose_thread_hangs(engine, adapters, prompt):
    await load(engine, adapters[0])
    idle = await engine.pulse()
    running = asyncio.create_task(engine.generate_together(sampling_requests([prompt])))
    await until_sampled(engine, 5, 1)
    first = await engine.pulse()
    await until_sampled(engine, 15, 1)
    second = await engine.pulse()
    assert (idle.num_open, first.num_open, second.num_open) == (0, 1, 1)
    assert idle.done < first.done < second.done
    await running
    going_on = threading.Event()
    engine._commands.submit(going_on.wait)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.pulse(), 0.5)
    going_on.set()
    assert (await engine.pulse()).num_open == 0
