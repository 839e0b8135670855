"""Dialogues that together are longer than the engine's cache still find their prefix in it."""

import asyncio
import random

import pytest
from real_engine import without_ends

from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines import vllm as vllm_engine
from rollout.engines import vllm_parts
from rollout.engines.engine import GenerationRequest
from tests.rollout.random_model import write_folder

pytestmark = pytest.mark.slow

NUM_DIALOGUES, NUM_TURNS, AT_A_TIME = 32, 4, 8
SYSTEM = tuple(range(10, 42))
"""Common start of all dialogues, one or two blocks of the cache."""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Start an engine whose cache of 2,560 tokens holds twelve whole dialogues."""
    usual = vllm_parts.engine_options
    small = {"num_gpu_blocks_override": 2560 // vllm_parts.kv_block("cpu")}
    folder = write_folder(tmp_path / "model", "tiny", weights=True)
    settings = EngineConfig(max_num_seqs=AT_A_TIME, max_model_len=512, adapter_mode="native")
    monkeypatch.setattr(vllm_parts, "engine_options", lambda *a, **k: usual(*a, **k) | small)
    without_ends(monkeypatch)
    engine = vllm_engine.VllmEngine(folder, settings, ModelConfig(lora_rank=8), seed=0)
    yield engine
    engine.close()


def words(rng):
    return tuple(rng.randrange(50, 500) for _ in range(32))


async def dialogue(engine, number):
    """Run a dialogue whose turns are 16 sampled tokens and a tool's result of 32.

    Return how many tokens had to be computed at least, without the common start.
    """
    rng = random.Random(number)
    told = SYSTEM + words(rng)
    for _ in range(NUM_TURNS):
        request = GenerationRequest(
            trajectory_id=str(number), prompt_token_ids=told, max_tokens=16, temperature=1.0, seed=len(told)
        )
        told += (await engine.generate(request)).token_ids + words(rng)
    engine.release(str(number))
    return len(told) - 32 - len(SYSTEM)


async def test_started_dialogues_continue_before_others_start(engine):
    """In order of arrival 2.2 times the needed tokens were computed; by dialogue it is 1.3 times."""
    before = await engine.pulse()
    lengths = await asyncio.gather(*(dialogue(engine, number) for number in range(NUM_DIALOGUES)))
    computed = (await engine.pulse()).done - before.done
    assert computed <= 1.5 * (sum(lengths) + len(SYSTEM))
