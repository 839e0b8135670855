"""The construction of vLLM's engine: options, kernels, memory."""

import asyncio
import json
import weakref
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from configs.errors import UserError
from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines.engine import GenerationRequest
from rollout.engines.vllm import VllmEngine
from rollout.engines.vllm_parts import FUSED, LOAD_FORMAT, engine_options, fused_norms
from rollout.model_files import weight_files
from tests.rollout.random_model import write_folder

PROMPT = tuple(range(50, 95))


def test_options_of_one_card_and_of_several():
    options = engine_options(EngineConfig(device="cuda", adapter_mode="native", kv_cache_gib=2.5), ModelConfig())
    assert "tensor_parallel_size" not in options
    assert options["kv_cache_memory_bytes"] == 2_684_354_560
    spread = EngineConfig(device="cuda", adapter_mode="native", tensor_parallel=4)
    options = engine_options(spread, ModelConfig())
    assert (options["tensor_parallel_size"], options["distributed_executor_backend"]) == (4, "mp")
    assert options["enable_lora"]
    for device, mode in [("cpu", "merged"), ("cpu", "native"), ("cuda", "merged")]:
        with pytest.raises(ValidationError, match="tensor_parallel"):
            EngineConfig(device=device, adapter_mode=mode, tensor_parallel=2)


@pytest.mark.parametrize(
    ("device", "mode", "in_lockstep", "ahead"),
    [
        *(("cuda", "native", False, True), ("cuda", "native", True, False)),
        *(("cuda", "merged", False, False), ("cpu", "native", False, False)),
    ],
)
def test_steps_are_scheduled_ahead_only_if_no_weights_change_in_place(device, mode, in_lockstep, ahead):
    config = EngineConfig(device=device, adapter_mode=mode)
    assert engine_options(config, ModelConfig(), in_lockstep=in_lockstep)["async_scheduling"] is ahead


FILES = [f"{name}.safetensors" for name in ("model", "model-1", "model-2", "consolidated", "adapter_model")]


@pytest.mark.slow
def test_a_models_files_are_those_that_learner_and_engine_read_and_are_refused_only_if_these_differ(tmp_path):
    from transformers.modeling_utils import _get_resolved_checkpoint_files
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    engine = DefaultModelLoader(LoadConfig(load_format=LOAD_FORMAT))
    sets = [files for num in range(1, 6) for files in combinations(FILES, num)]
    for number, (files, indexed) in enumerate(product(sets, ((), FILES[:1], FILES[1:3], FILES[:3]))):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in files:
            (folder / file).touch()
        if indexed:
            index = {"metadata": {}, "weight_map": dict(zip("abc", indexed, strict=False))}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        read = []
        try:
            read.append(sorted(engine._prepare_weights(str(folder), None, None, True, None)[1]))
            found = _get_resolved_checkpoint_files(str(folder), None, None, None, None, False)[0]
            read.append(sorted(found if all(map(Path.exists, map(Path, found))) else ()))
        except (OSError, RuntimeError):
            pass  # a file is missing
        try:
            assert [[*map(str, weight_files(folder))]] * 2 == read
        except UserError:
            assert len(read) < 2 or read[0] != read[1], (files, indexed)


# Kernels.

EPSILON = 1e-5
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""Error at a value near 1: the kernel rounds once to bfloat16, the operations twice."""


def rows(dtype, *, width=576, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(7, width, generator=generator).to(dtype)


def norm_weight(dtype, width=576):
    return (1 + 0.1 * torch.randn(width, generator=torch.Generator().manual_seed(9))).to(dtype)


@pytest.mark.slow
def test_kernels_of_norms_agree_with_plain_operations():
    from vllm import ir

    for _ in range(2):
        assert fused_norms() == {"rms_norm": [FUSED, "native"], "fused_add_rms_norm": [FUSED, "native"]}
    norm, norm_of_sum = ir.ops.rms_norm.impls, ir.ops.fused_add_rms_norm.impls
    for dtype, bound in ROUNDING.items():
        x, residual, weight = rows(dtype), rows(dtype, seed=1), norm_weight(dtype)
        plain, fused = (norm[name].impl_fn(x, weight, EPSILON) for name in ("native", FUSED))
        torch.testing.assert_close(fused, plain, rtol=bound, atol=bound)
        (plain, plain_sum), (fused, fused_sum) = (
            norm_of_sum[name].impl_fn(x.clone(), residual.clone(), weight, EPSILON) for name in ("native", FUSED)
        )
        # Some processors round the sum in bfloat16 once more.
        of_sum, of_norm = (0, bound) if dtype == torch.float32 else (bound, 2 * bound)
        torch.testing.assert_close(fused_sum, plain_sum, rtol=of_sum, atol=0)
        torch.testing.assert_close(fused, plain, rtol=of_norm, atol=of_norm)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["merged", "native"])
def test_closed_engine_frees_its_memory_and_another_one_works_on(tmp_path, mode):
    folder = write_folder(tmp_path / "model", "tiny", weights=True)
    settings = EngineConfig(max_num_seqs=2, max_model_len=512, adapter_mode=mode)
    closed, other = (VllmEngine(folder, settings, ModelConfig(lora_rank=8), seed=0) for _ in range(2))
    request = GenerationRequest(trajectory_id="a", prompt_token_ids=PROMPT, max_tokens=8, temperature=0.0)
    asyncio.run(other.generate(request))
    before = asyncio.run(other.generate(request))
    runner = closed._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    parts = [weakref.ref(part) for part in (runner.model, *runner.kv_caches)]
    del runner
    assert len(parts) > 1
    closed.close()
    assert [part() for part in parts] == [None] * len(parts)
    assert asyncio.run(other.generate(request)) == before
    other.close()
