"""A process may hold several engines, one after the other or side by side."""

import asyncio
import weakref

import pytest

from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines.vllm import VllmEngine
from tests.rollout.random_model import write_folder

pytestmark = pytest.mark.slow

PROMPT = tuple(range(50, 95))


def memory(engine):
    """The model, and each layer's part of the cache."""
    runner = engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return [weakref.ref(part) for part in (runner.model, *runner.kv_caches)]


@pytest.mark.parametrize("mode", ["merged", "native"])
def test_closed_engine_gives_its_memory_back_and_the_one_beside_it_works_on(tmp_path, mode):
    folder = write_folder(tmp_path / "model", "tiny", weights=True)
    settings = EngineConfig(max_num_seqs=2, max_model_len=512, adapter_mode=mode)
    closed, other = (VllmEngine(folder, settings, ModelConfig(lora_rank=8), seed=0) for _ in range(2))
    before = asyncio.run(other.score(PROMPT))
    held = memory(closed)
    assert len(held) > 1
    closed.close()
    assert [part() for part in held] == [None] * len(held)
    assert asyncio.run(other.score(PROMPT)) == before
    other.close()
