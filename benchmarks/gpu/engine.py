"""`VllmEngine` with native adapters on a card: what its tests promise on a CPU, at a small size."""

import asyncio
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.gpu.stage import Found, Stage, found, need

RANK = 8
SIZE = 0.05
"""Deviation of the adapters' B: enough to tell their versions apart."""


def engine(stage: Stage) -> Found:
    """A grammar is followed; what is sampled and what is scored has the learner's log-probs under the same version;
    what began before a load ends with its own version."""
    need("vllm", "pydantic", "peft", "xgrammar", "transformers")
    from configs.learner import LearnerConfig, ModelConfig
    from configs.rollout import EngineConfig
    from learner.learner import Learner
    from rollout.engines.vllm import VllmEngine
    from tests.rollout.random_model import write_folder

    folder = write_folder(stage.out / "model-small", "tiny", weights=True)
    model = ModelConfig(lora_rank=RANK, lora_alpha=2.0 * RANK)
    learner = Learner(folder, model, LearnerConfig(device=stage.device, num_threads=1), seed=0)
    adapters = [random_adapter(learner, version) for version in range(2)]
    settings = EngineConfig(device=stage.device, adapter_mode="native", max_num_seqs=8, max_model_len=512)
    sampler = VllmEngine(folder, settings, model, seed=0)
    try:
        played = asyncio.run(_play(sampler, adapters))
    finally:
        sampler.close()
    return found(_values(learner, adapters, played), versions=[one.policy_version for one in played["sampled"]])


def random_adapter(learner: Any, version: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(version)
    for name, parameter in learner.policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data = (SIZE * torch.randn(parameter.shape, generator=generator)).to(parameter.device)
    learner.policy_version = version
    return learner.adapter()


async def _play(engine: Any, adapters: Sequence[Any]) -> dict[str, Any]:
    from benchmarks.gpu.sync_stall import requests
    from rollout.engines.engine import GenerationRequest
    from tests.rollout.random_model import GRAMMAR

    prompt = tuple(range(10, 40))
    await engine.load_adapter(0, adapters[0].data)
    in_grammar = await engine.generate(
        GenerationRequest(
            trajectory_id="g", prompt_token_ids=prompt, max_tokens=16, temperature=1.0, grammar=GRAMMAR, seed=1
        )
    )
    scored = await engine.score(prompt)
    asked = requests(4, 30, 200)
    before = [asyncio.create_task(engine.generate(one)) for one in asked[:2]]
    while not engine._open:  # noqa: ASYNC110 (nothing tells of a step)
        await asyncio.sleep(0.001)
    await engine.load_adapter(1, adapters[1].data)
    after = await asyncio.gather(*(engine.generate(one) for one in asked[2:]))
    return {
        "grammar": in_grammar,
        "scored": (prompt, scored),
        "asked": asked,
        "sampled": [*await asyncio.gather(*before), *after],
    }


def _values(learner: Any, adapters: Sequence[Any], played: dict[str, Any]) -> dict[str, float | bool]:
    import numpy as np

    from tests.rollout.random_model import GRAMMAR

    sampled, versions = played["sampled"], (0, 0, 1, 1)
    pairs = list(zip(played["asked"], sampled, strict=True))
    gaps = {
        version: [_gap(learner, adapters[version], one.prompt_token_ids, done) for one, done in pairs]
        for version in (0, 1)
    }
    own = [gaps[version][place] for place, version in enumerate(versions)]
    other = [gaps[1 - version][place] for place, version in enumerate(versions)]
    prompt, scored = played["scored"]
    try:
        learner.policy._grammars.allowed(GRAMMAR, np.array(played["grammar"].token_ids))
        follows = True
    except ValueError:
        follows = False
    return {
        "follows_grammar": follows,
        "versions_right": tuple(one.policy_version for one in sampled) == versions,
        "own_version_is_nearest": all(mine < 0.5 * theirs for mine, theirs in zip(own, other, strict=True)),
        "gap_nats": fmean(own),
        "score_gap_nats": mean_gap(told(learner, adapters[0], prompt)[1:], scored),
    }


def _gap(learner: Any, adapter: Any, prompt: Sequence[int], done: Any) -> float:
    own = told(learner, adapter, (*prompt, *done.token_ids))
    return mean_gap(own[len(prompt) :], done.logprobs)


def told(learner: Any, adapter: Any, token_ids: Sequence[int]) -> list[float]:
    """The learner's log-probs with an adapter; the first token has none."""
    import torch

    from learner.samples import scoring_sample

    learner.load_adapter(adapter)
    with torch.no_grad():
        logprobs: list[float] = learner.policy.logprobs([scoring_sample(tuple(token_ids))])[0].tolist()
    return logprobs


def mean_gap(one: Sequence[float], other: Sequence[float]) -> float:
    return fmean(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True))
