"""Dialogues that together are longer than the engine's cache: what was computed once is there for the next turn."""

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
"""One or two blocks of the cache, which all of them begin with."""


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Its cache holds twelve whole dialogues: 2,560 tokens."""
    own = vllm_parts.engine_options
    small = {"num_gpu_blocks_override": 2560 // vllm_parts.kv_block("cpu")}
    folder = write_folder(tmp_path_factory.mktemp("tiny") / "model", "tiny", weights=True)
    settings = EngineConfig(max_num_seqs=AT_A_TIME, max_model_len=512, adapter_mode="native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_parts, "engine_options", lambda *a, **k: own(*a, **k) | small)
        without_ends(patch)
        engine = vllm_engine.VllmEngine(folder, settings, ModelConfig(lora_rank=8), seed=0)
        yield engine
        engine.close()


@pytest.fixture
async def engine(started):
    """With an empty cache."""
    await started.forget_prefixes()
    return started


def words(rng):
    return tuple(rng.randrange(50, 500) for _ in range(32))


async def turn(engine, name, told, rng):
    """16 sampled tokens, and a tool's result of 32, which is there at once: while a tool works, others may begin.
    Returns the dialogue so far."""
    request = GenerationRequest(
        trajectory_id=name, prompt_token_ids=told, max_tokens=16, temperature=1.0, seed=len(told)
    )
    completion = await engine.generate(request)
    return told + completion.token_ids + words(rng)


async def dialogue(engine, number):
    """Returns how many tokens of it had to be computed, what all begin with left out."""
    rng = random.Random(number)
    told = SYSTEM + words(rng)
    for _ in range(NUM_TURNS):
        told = await turn(engine, str(number), told, rng)
    engine.release(str(number))
    return len(told) - 32 - len(SYSTEM)


async def test_a_dialogue_that_began_goes_on_before_others_begin(engine):
    """Were the turns served as they come, each would be the last of all dialogues' turns, and find its beginning
    evicted: 2.2 times what is needed was computed. Now it is 1.3 times."""
    before = engine.load
    lengths = await asyncio.gather(*(dialogue(engine, number) for number in range(NUM_DIALOGUES)))
    computed = engine.load.computed_tokens - before.computed_tokens
    repeated = engine.load.repeated_tokens - before.repeated_tokens
    assert computed <= 1.5 * (sum(lengths) + len(SYSTEM))
    assert repeated <= 0.1 * computed


async def test_what_is_computed_again_because_it_is_in_the_cache_no_more_is_counted(engine):
    """The second turn begins with 64 + 16 tokens, whose first two blocks of 32 are whole; the third with 112 + 16, of
    which the last was sampled and not computed: three blocks."""
    rng, before = random.Random(0), engine.load.repeated_tokens
    told = await turn(engine, "a", SYSTEM + words(rng), rng)
    await engine.forget_prefixes()
    told = await turn(engine, "a", told, rng)
    assert engine.load.repeated_tokens - before == 64
    told = await turn(engine, "a", told, rng)
    assert engine.load.repeated_tokens - before == 64
    await engine.forget_prefixes()
    await turn(engine, "b", told, rng)  # begins as another one did, and is none of its turns
    assert engine.load.repeated_tokens - before == 64
    await turn(engine, "a", told, rng)
    assert engine.load.repeated_tokens - before == 64
