"""Either block of a CPU's cache, with the kernel that goes with it, gives the same samples and log-probs."""

import asyncio

import pytest
from real_engine import without_ends

from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines import vllm_parts
from rollout.engines.engine import GenerationRequest
from rollout.engines.vllm import VllmEngine
from tests.rollout.random_model import write_folder

pytestmark = pytest.mark.slow

PROMPT = tuple(range(50, 95))


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """Samples with blocks of one size: the ids, their log-probs as they were drawn, and as they are scored after."""
    folder = write_folder(tmp_path / "model", "tiny", weights=True)
    without_ends(monkeypatch)

    def sample(lacks_avx512):
        monkeypatch.setattr(vllm_parts, "lacks_avx512", lambda: lacks_avx512)
        settings = EngineConfig(max_num_seqs=2, max_model_len=512, dtype="float32", adapter_mode="native")
        engine = VllmEngine(folder, settings, ModelConfig(lora_rank=8), seed=0)
        request = GenerationRequest(trajectory_id="a", prompt_token_ids=PROMPT, max_tokens=40, temperature=1.0, seed=3)
        try:
            completion = asyncio.run(engine.generate(request))
            scores = asyncio.run(engine.score(PROMPT + completion.token_ids))
            assert engine._llm.vllm_config.cache_config.block_size == vllm_parts.kv_block("cpu")
        finally:
            engine.close()
        return completion.token_ids, completion.logprobs, scores[len(PROMPT) - 1 :]

    return sample


def test_blocks_of_16_and_of_32_sample_the_same(sample):
    ids, drawn, scored = sample(lacks_avx512=True)
    assert drawn == pytest.approx(scored, abs=1e-4)
    ids_of_32, drawn_of_32, _ = sample(lacks_avx512=False)
    assert (len(ids), ids) == (40, ids_of_32)
    assert drawn == pytest.approx(drawn_of_32, abs=1e-4)
