"""The real engine in merged mode, with the demo model."""

import asyncio
import hashlib
from itertools import count

import pytest
from real_engine import (
    build_engine,
    build_learner,
    in_engine_thread,
    learner_logprobs,
    make_adapter,
    mean_gap,
    request,
    until_sampled,
)

pytestmark = pytest.mark.slow

next_version = count(1).__next__
"""The engine outlives a test, and no version comes twice."""


@pytest.fixture(scope="module")
def model_path():
    from learner.demo_model import ensure_demo_model

    return ensure_demo_model()


@pytest.fixture(scope="module")
def learner(model_path):
    return build_learner(model_path)


@pytest.fixture(scope="module")
def merged(model_path):
    engine = build_engine(model_path, max_num_seqs=16)
    yield engine
    engine.close()


@pytest.fixture
async def engine(merged):
    """The engine with the base model and an empty cache."""
    await merged.load_base()
    return merged


@pytest.fixture(scope="module")
def chat(model_path):
    from rollout.building import build_chat

    return build_chat(model_path)


@pytest.fixture(scope="module")
def prompt(chat):
    return chat.prompt("You are helpful.", "What is 2 + 3?")


def long_requests(chat, num_requests=4, **changes):
    """Requests of one prompt that go on for long, each with a seed of its own."""
    prompt = chat.prompt("You are helpful. " * 10, "Count from one to two hundred in words, one number per line.")
    options = {"max_tokens": 48, "temperature": 1.0} | changes
    return [request(prompt, seed=seed, trajectory_id=f"t{seed}", **options) for seed in range(num_requests)]


async def play_with_update(engine, requests, adapter, num_tokens=12):
    """The completions of requests that have sampled some tokens when an adapter comes, and the digest of it."""
    running = asyncio.create_task(engine.generate_together(requests))
    await until_sampled(engine, num_tokens, len(requests))
    digest = await engine.load_adapter(adapter.policy_version, adapter.data)
    assert not running.done()
    return await running, digest


# An adapter that comes while requests run.


async def test_requests_that_run_are_not_waited_for_and_say_from_which_token_on_newer_weights_sampled(
    engine, learner, chat
):
    old, new = make_adapter(learner, next_version()), make_adapter(learner, next_version())
    requests = long_requests(chat)
    await engine.load_adapter(old.policy_version, old.data)
    undisturbed = await engine.generate_together(requests)
    again = make_adapter(learner, next_version())
    await engine.load_adapter(again.policy_version, old.data)
    completions, digest = await play_with_update(engine, requests, make_adapter(learner, new.policy_version + 2))
    assert digest == hashlib.sha256(make_adapter(learner, new.policy_version + 2).data).hexdigest()
