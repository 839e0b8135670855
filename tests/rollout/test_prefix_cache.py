"""Dialogues that together are longer than the engine's cache: what was computed once is there for the next turn."""

import asyncio
import random

import pytest
from real_engine import without_ends

from benchmarks.gpu.random_model import write_folder
from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines import vllm as vllm_engine
from rollout.engines import vllm_parts
from rollout.engines.engine import GenerationRequest

pytestmark = pytest.mark.slow

NUM_DIALOGUES, NUM_TURNS, AT_A_TIME = 32, 4, 8
SYSTEM = tuple(range(10, 42))
"""A block of the cache, which all of them begin with."""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Its cache holds twelve whole dialogues, in blocks of 32 tokens."""
    own = vllm_parts.engine_options
    monkeypatch.setattr(vllm_parts, "engine_options", lambda *a, **k: own(*a, **k) | {"num_gpu_blocks_override": 80})
    without_ends(monkeypatch)
    folder = write_folder(tmp_path / "model", "tiny", weights=True)
    settings = EngineConfig(max_num_seqs=AT_A_TIME, max_model_len=512, adapter_mode="native")
    engine = vllm_engine.VllmEngine(folder, settings, ModelConfig(lora_rank=8), seed=0)
    yield engine
    engine.close()


def words(rng):
    return tuple(rng.randrange(50, 500) for _ in range(32))


async def dialogue(engine, number):
    """Its turns, one after the other, each with a tool's result; returns its length without what all begin with."""
    rng = random.Random(number)
    told = SYSTEM + words(rng)
    for turn in range(NUM_TURNS):
        asked = GenerationRequest(
            trajectory_id=str(number), prompt_token_ids=told, max_tokens=16, temperature=1.0, seed=turn
        )
        told += (await engine.generate(asked)).token_ids
        if turn < NUM_TURNS - 1:
            await asyncio.sleep(0.01)
            told += words(rng)
    engine.release(str(number))
    return len(told) - len(SYSTEM)


async def test_a_dialogue_that_began_goes_on_before_others_begin(engine):
    """Were the turns served as they come, each would be the last of all dialogues' turns, and find its beginning
    evicted: 2.2 times what is needed was computed."""
    lengths = await asyncio.gather(*(dialogue(engine, number) for number in range(NUM_DIALOGUES)))
    pulse = await engine.pulse()
    assert pulse.done <= 1.5 * (sum(lengths) + len(SYSTEM))
