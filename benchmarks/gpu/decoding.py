"""vLLM at the sizes of Qwen3-8B with weights made up: tokens/s, seconds of a step, and the stall of a new adapter."""

import asyncio
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.learner import cap, plan_of, recipe, reserved_gib
from benchmarks.gpu.stage import Found, Stage, found, need

SHARED_COPY_GIB = 17.7
"""KV cache of an A40 whose engine and learner hold one copy of the weights."""
LOADS = 6


def decoding(stage: Stage) -> Found:
    return _decode(stage, kv_gib=SHARED_COPY_GIB, running=32, loads=LOADS)


def small_cache(stage: Stage) -> Found:
    """As many as the recipe's cache takes at a time."""
    return _decode(stage, kv_gib=3.0, running=10, loads=0)


def in_step(stage: Stage) -> Found:
    return _decode(stage, kv_gib=SHARED_COPY_GIB, running=32, loads=0, ahead=False)


def _decode(stage: Stage, *, kv_gib: float, running: int, loads: int, ahead: bool = True) -> Found:
    need("vllm", "pydantic", "xgrammar", "transformers")
    from benchmarks.gpu.sync_stall import Stall, measure, requests
    from tests.rollout.random_model import adapter_of, write_folder

    sizes, prompt, sampled = ("tiny", 64, 48) if stage.rehearsal else ("qwen3-8b", 1500, 256)
    folder = write_folder(stage.out / f"model-{sizes}", sizes)
    config = recipe(stage, f"model.path={folder}", f"rollout.engine.kv_cache_gib={1 if stage.rehearsal else kv_gib}")
    adapters = [(version, adapter_of(folder, config.model.lora_rank, seed=version)) for version in range(1 + loads)]
    asked = requests(4 if stage.rehearsal else running, prompt, sampled)

    async def measured(engine: Any) -> tuple[Stall, Stall]:
        await engine.load_adapter(*adapters[0])
        # Their prompts first: what is measured is decoding. Once while nothing is loaded, for the speed; once more for
        # the stalls.
        await asyncio.gather(*(engine.generate(one) for one in requests(len(asked), prompt, 8)))
        calm = await measure(engine, asked, ())
        return calm, await measure(engine, asked, adapters[1:]) if loads else calm

    cap(stage)
    with dummy_weights(), endless():
        engine = _engine(folder, config, ahead=ahead)
        try:
            calm, disturbed = asyncio.run(measured(engine))
        finally:
            engine.close()
    planned, context = plan_of(config, "engine")
    values: dict[str, float | bool] = {
        "decode_step_ms": 1e3 * calm.step_s,
        "sampled_tokens_per_s": calm.num_tokens / calm.wall_s,
        "peak_gib": reserved_gib(stage) + (0.0 if stage.rehearsal else context),
    }
    if loads:
        values["stall_ms"] = 1e3 * max(disturbed.stall_s)
    told = {"calm": asdict(calm), "disturbed": asdict(disturbed), "running": len(asked), "ahead": ahead}
    return found(values, planned={"engine": planned}, **told)


def _engine(folder: Path, config: Any, *, ahead: bool) -> Any:
    from rollout.engines.vllm import VllmEngine

    return VllmEngine(folder, config.rollout.engine, config.model, seed=0, in_lockstep=not ahead)


@contextmanager
def dummy_weights() -> Iterator[None]:
    """vLLM makes the weights up; names of weights come from the configuration."""
    import vllm.engine.arg_utils as arguments

    from rollout.engines import adapters
    from tests.rollout.random_model import weight_names

    def names(model_path: Path) -> Iterator[tuple[str, Any]]:
        return ((name, None) for name in weight_names(model_path))

    made_up = functools.partial(arguments.EngineArgs, load_format="dummy")
    with patch.object(arguments, "EngineArgs", made_up), patch.object(adapters, "weights_in", names):
        yield


@contextmanager
def endless() -> Iterator[None]:
    """Every completion is as long as it may be."""
    from rollout.engines import vllm

    own = vllm.sampling_params

    def params(asked: Any) -> Any:
        made = own(asked)
        made.ignore_eos = True
        return made

    vllm.sampling_params = params
    try:
        yield
    finally:
        vllm.sampling_params = own
