"""The construction of vLLM's engine: options, kernels, memory."""

import asyncio
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from real_engine import without_ends

from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines import vllm_parts
from rollout.engines.engine import GenerationRequest
from rollout.engines.vllm import VllmEngine
from rollout.engines.vllm_parts import FUSED, _register_loader, build_llm, engine_options, fused_norms
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
        ("cuda", "native", False, True),
        ("cuda", "native", True, False),
        ("cuda", "merged", False, False),
        ("cpu", "native", False, False),
    ],
)
def test_steps_are_scheduled_ahead_only_if_no_weights_change_in_place(device, mode, in_lockstep, ahead):
    config = EngineConfig(device=device, adapter_mode=mode)
    assert engine_options(config, ModelConfig(), in_lockstep=in_lockstep)["async_scheduling"] is ahead


@pytest.mark.parametrize(
    ("mode", "dtype", "published"),
    [("native", "bfloat16", "bfloat16"), ("native", "float32", "float32"), ("merged", "bfloat16", "float32")],
)
def test_adapters_are_published_in_the_type_to_which_the_engine_rounds_them(mode, dtype, published):
    assert EngineConfig(adapter_mode=mode, dtype=dtype).adapter_precision == published


@pytest.mark.slow
@pytest.mark.parametrize("metrics", [False, True])
def test_metrics_go_to_ray_if_the_recipe_wants_them(monkeypatch, metrics):
    from vllm import envs
    from vllm.engine import arg_utils
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics import ray_wrappers

    options = {}

    def build(arguments, **more):
        options.update(arguments, **more)
        core = SimpleNamespace(structured_output_manager=SimpleNamespace())
        return SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))

    monkeypatch.setattr(arg_utils, "EngineArgs", dict)
    monkeypatch.setattr(LLMEngine, "from_engine_args", build)
    build_llm(Path("model"), EngineConfig(metrics=metrics), ModelConfig(), 0)
    assert options["disable_log_stats"] is not metrics
    assert options["stat_loggers"] == ([ray_wrappers.RayPrometheusStatLogger] if metrics else None)
    # Needs ray.serve, whose requirements Ray alone does not install.
    assert ray_wrappers.ray_metrics is not None
    # vLLM would import FlashInfer, which need not be installed.
    assert not envs.VLLM_USE_FLASHINFER_SAMPLER


@pytest.mark.slow
def test_engine_starts_on_a_card_that_the_holder_of_the_base_weights_has_filled():
    """An A40, where another process holds the weights of 8B parameters."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.v1.worker.utils import request_memory

    base = {"weight": torch.empty(8_190_735_360, dtype=torch.bfloat16, device="meta")}
    loader = get_model_loader(LoadConfig(load_format=_register_loader(base)))
    options = engine_options(EngineConfig(device="cuda", adapter_mode="native"), ModelConfig())
    card = SimpleNamespace(total_memory=44 << 30, free_memory=20 << 30, device_="cuda:0")
    arguments = SimpleNamespace(gpu_memory_utilization=options["gpu_memory_utilization"])
    assert request_memory(card, arguments, loader.get_external_weight_memory(None)) < card.free_memory


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
        torch.testing.assert_close(fused_sum, plain_sum, rtol=0 if dtype == torch.float32 else bound, atol=0)
        torch.testing.assert_close(fused, plain, rtol=2 * bound, atol=2 * bound)


@pytest.mark.slow
def test_kernels_of_norms_refuse_what_they_cannot_compute():
    from vllm import ir

    fused_norms()
    x, weight = rows(torch.float32), norm_weight(torch.float32)
    fits, fits_sum = ir.ops.rms_norm.impls[FUSED].supports_args, ir.ops.fused_add_rms_norm.impls[FUSED].supports_args
    assert fits(x, weight, EPSILON)
    assert fits_sum(x, x, weight, EPSILON)
    strided, odd = rows(torch.float32, width=2 * 576)[:, :576], rows(torch.float32, width=577)
    for other, its_weight in [
        (strided, weight),
        (odd, norm_weight(torch.float32, 577)),
        (x, None),
        (x, weight.bfloat16()),
    ]:
        assert not fits(other, its_weight, EPSILON)
        assert not fits_sum(other, other, its_weight, EPSILON)
    assert not fits_sum(x, strided, weight, EPSILON)
    assert not fits(x, weight, EPSILON, 288)


@pytest.mark.slow
def test_both_block_sizes_of_a_cpu_sample_the_same(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "model", "tiny", weights=True)
    without_ends(monkeypatch)
    completions = []
    for lacks_avx512 in (True, False):
        monkeypatch.setattr(vllm_parts, "lacks_avx512", lambda value=lacks_avx512: value)
        settings = EngineConfig(max_num_seqs=2, max_model_len=512, dtype="float32", adapter_mode="native")
        engine = VllmEngine(folder, settings, ModelConfig(lora_rank=8), seed=0)
        request = GenerationRequest(trajectory_id="a", prompt_token_ids=PROMPT, max_tokens=40, temperature=1.0, seed=3)
        try:
            completions.append(asyncio.run(engine.generate(request)))
            assert engine._llm.vllm_config.cache_config.block_size == vllm_parts.kv_block("cpu")
        finally:
            engine.close()
    first, second = completions
    assert (len(first.token_ids), first.token_ids) == (40, second.token_ids)
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-4)


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
