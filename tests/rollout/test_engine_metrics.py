"""vLLM's own metrics go through Ray's where the recipe asks for them, and cost nothing where it does not."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.learner import ModelConfig
from configs.rollout import EngineConfig
from rollout.engines.vllm_parts import build_llm

pytestmark = pytest.mark.slow


@pytest.fixture
def asked(monkeypatch):
    """What vLLM is asked to build; it builds nothing."""
    from vllm.engine import arg_utils
    from vllm.v1.engine.llm_engine import LLMEngine

    made = {}

    def build(arguments, **options):
        made.update(arguments, **options)
        core = SimpleNamespace(structured_output_manager=SimpleNamespace())
        return SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))

    monkeypatch.setattr(arg_utils, "EngineArgs", dict)
    monkeypatch.setattr(LLMEngine, "from_engine_args", build)
    return made


def test_engine_gathers_no_statistics_by_itself(asked):
    build_llm(Path("model"), EngineConfig(), ModelConfig(), 0)
    assert asked["disable_log_stats"] is True
    assert asked["stat_loggers"] is None


def test_vllm_finds_what_its_ray_metrics_need():
    """They import ray.serve, whose requirements Ray alone does not install; without them the engine ends at once."""
    from vllm.v1.metrics import ray_wrappers

    assert ray_wrappers.ray_metrics is not None


def test_engine_whose_metrics_are_wanted_hands_them_to_ray(asked):
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    build_llm(Path("model"), EngineConfig(metrics=True), ModelConfig(), 0)
    assert asked["disable_log_stats"] is False
    assert asked["stat_loggers"] == [RayPrometheusStatLogger]
