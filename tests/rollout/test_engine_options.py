import pytest
from pydantic import ValidationError

from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines.vllm_parts import engine_options


def test_engine_on_one_card_is_not_spread():
    options = engine_options(EngineConfig(device="cuda", adapter_mode="native", kv_cache_gib=2.5), ModelConfig())
    assert "tensor_parallel_size" not in options
    assert options["kv_cache_memory_bytes"] == 2_684_354_560


def test_spread_engine_starts_its_workers_by_itself():
    config = EngineConfig(device="cuda", adapter_mode="native", tensor_parallel=4)
    options = engine_options(config, ModelConfig())
    assert (options["tensor_parallel_size"], options["distributed_executor_backend"]) == (4, "mp")
    assert options["enable_lora"]


@pytest.mark.parametrize(("device", "mode"), [("cpu", "merged"), ("cpu", "native"), ("cuda", "merged")])
def test_engine_is_spread_over_cards_with_native_adapters_only(device, mode):
    with pytest.raises(ValidationError, match="tensor_parallel = 2 needs device = 'cuda' and adapter_mode = 'native'"):
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
def test_a_card_never_waits_for_the_schedule_of_its_next_step_where_no_weights_change_under_it(
    device, mode, in_lockstep, ahead
):
    config = EngineConfig(device=device, adapter_mode=mode)
    assert engine_options(config, ModelConfig(), in_lockstep=in_lockstep)["async_scheduling"] is ahead


@pytest.mark.parametrize(
    ("settings", "published"),
    [
        ({"adapter_mode": "native", "dtype": "bfloat16"}, "bfloat16"),
        ({"adapter_mode": "native", "dtype": "float32"}, "float32"),
        ({"adapter_mode": "merged", "dtype": "bfloat16"}, "float32"),
    ],
)
def test_adapters_are_published_in_the_engines_type_where_it_rounds_them_to_it(settings, published):
    assert EngineConfig(**settings).adapter_precision == published


def test_a_card_needs_no_flashinfer_to_sample():
    """vLLM would import it for top-k and top-p, which no request has, and end where it is not installed."""
    from vllm import envs

    assert not envs.VLLM_USE_FLASHINFER_SAMPLER
