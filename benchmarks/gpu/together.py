"""One card, three processes: one copy of the base, and an engine and a learner that read it, alone and side by side."""

import asyncio
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.decoding import endless
from benchmarks.gpu.facts import synchronize
from benchmarks.gpu.learner import CARD, UNGUARDED, recipe, trees
from benchmarks.gpu.peer import Peer, serve
from benchmarks.gpu.sharing import used_gib
from benchmarks.gpu.stage import Found, Stage, found, need
from tests.rollout.random_model import random_weights, write_folder

if TYPE_CHECKING:
    from configs.run import RunConfig

HEAD_SCALE = 4.0
"""The head's weights times this: a distribution of a few nats, as a trained model's, and not of all words alike."""
KV_GIB = 17.5
SECONDS = 15.0
"""Of each measurement of speed."""
SAMPLED = 4
"""Completions whose log-probs are compared."""


def together(stage: Stage) -> Found:
    """Speed of engine and learner alone and beside each other, what all take of the card, and their log-probs."""
    need("vllm", "pydantic", "peft", "xgrammar", "transformers")
    sizes = "tiny" if stage.rehearsal else "qwen3-8b"
    folder = _whole_folder(stage, sizes)
    kv_gib = 1 if stage.rehearsal else KV_GIB
    shared = () if stage.rehearsal else ("card.share_base=true",)
    config = recipe(stage, f"model.path={folder}", f"rollout.engine.kv_cache_gib={kv_gib}", *shared, *UNGUARDED)
    seconds, before = 1.0 if stage.rehearsal else SECONDS, used_gib(stage.device)
    holder = Peer.start(_hold, folder, config)
    learner = Peer.start(_train, config, holder.ask("export"), stage)
    engine = Peer.start(_sample, config, holder.ask("export"), stage)
    learner.ask("train", 0.0)
    engine.ask("load", 1, learner.ask("adapter", 1))
    gaps = _gaps(engine, learner)
    engine.ask("decode", 0.0)
    sampled, trained = engine.ask("decode", seconds), learner.ask("train", seconds)
    engine.tell("decode", 2 * seconds)
    trained_beside = learner.ask("train", 2 * seconds)
    sampled_beside = engine.hear()
    used = used_gib(stage.device) - before
    told = {"engine_gib": engine.ask("peak"), "learner_gib": learner.ask("peak")}
    for peer in (engine, learner, holder):
        peer.kill()
    return found(
        {
            **gaps,
            "card_gib": used,
            "sampled_beside_alone": sampled_beside / sampled,
            "trained_beside_alone": trained_beside / trained,
        },
        planned={"all": _planned(config)},
        sampled_tokens_per_s={"alone": sampled, "beside": sampled_beside},
        trained_tokens_per_s={"alone": trained, "beside": trained_beside},
        **told,
    )


def _whole_folder(stage: Stage, sizes: Any) -> Path:
    """A model's folder with random weights in a file."""
    from safetensors.torch import save_file

    folder = write_folder(stage.out / f"model-{sizes}-whole", sizes)
    if not (folder / "model.safetensors").exists():
        weights = random_weights(folder, device=stage.device, precision="bfloat16")
        weights["lm_head.weight"] *= HEAD_SCALE
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        del weights
        torch.cuda.empty_cache()
    return folder


def _planned(config: "RunConfig") -> float:
    """GiB that the plan gives to all but the PRM, which does not run here."""
    from ray_jobs.plan.plan import make_plan

    plan, _ = make_plan(config, card=CARD)
    return sum(process.num_bytes for process in plan.processes if process.name != "PRM") / 2**30


def _gaps(engine: Peer, learner: Peer) -> dict[str, float | bool]:
    """Against the version that the engine has, and whether another one is farther away."""
    from benchmarks.gpu.engine import mean_gap

    sampled, scored = engine.ask("sample"), engine.ask("score")

    def gap(version: int) -> float:
        told = [learner.ask("told", version, (*prompt, *tokens))[len(prompt) :] for prompt, tokens, _ in sampled]
        return fmean(mean_gap(mine, logprobs) for mine, (_, _, logprobs) in zip(told, sampled, strict=True))

    own = gap(1)
    return {
        "gap_nats": own,
        "score_gap_nats": mean_gap(learner.ask("told", 1, _prompt())[1:], scored),
        "own_version_is_nearest": own < 0.5 * gap(2),
    }


def _prompt() -> tuple[int, ...]:
    return tuple(10 + place * 31 % 480 for place in range(400))


def _hold(pipe: Connection, folder: Path, config: "RunConfig") -> None:
    from rollout.engines.base_weights import BaseWeights

    engine = config.rollout.engine
    base = BaseWeights(folder, device=engine.device, precision=engine.precision)
    serve(pipe, {"export": base.export})


def _train(pipe: Connection, config: "RunConfig", exported: Any, stage: Stage) -> None:
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    from benchmarks.gpu.engine import random_adapter, told
    from learner.learner import Learner

    base = exported.parts()
    trained = Learner(Path(config.model.path), config.model, config.learner, seed=0, base_weights=base)
    batch = trees(config, trained.policy.vocab_size, count=1 if stage.rehearsal else 4)
    adapters = {version: random_adapter(trained, version) for version in (1, 2)}

    def train(seconds: float) -> float:
        """Packed tokens/s of as many steps as begin within the time, at least one."""
        started, tokens = time.perf_counter(), 0.0
        while not tokens or time.perf_counter() - started < seconds:
            tokens += trained.train_step(batch).metrics["learner/packed_tokens"]
        synchronize(stage.device)
        return tokens / (time.perf_counter() - started)

    answers = {
        "train": train,
        "adapter": lambda version: adapters[version].data,
        "told": lambda version, tokens: told(trained, adapters[version], tokens),
        "peak": lambda: torch.cuda.max_memory_reserved() / 2**30,
    }
    serve(pipe, answers)


def _sample(pipe: Connection, config: "RunConfig", exported: Any, stage: Stage) -> None:
    from benchmarks.gpu.sync_stall import requests
    from rollout.engines.vllm import VllmEngine

    engine = VllmEngine(Path(config.model.path), config.rollout.engine, config.model, seed=0, base=exported)
    running, prompt, length = (4, 64, 16) if stage.rehearsal else (32, 1500, 256)
    asked = requests(running, prompt, length)

    async def sample() -> list[tuple[Any, ...]]:
        few = requests(SAMPLED, 60, 12 if stage.rehearsal else 100)
        done = await asyncio.gather(*(engine.generate(one) for one in few))
        return [(one.prompt_token_ids, made.token_ids, made.logprobs) for one, made in zip(few, done, strict=True)]

    def decode(seconds: float) -> float:
        with endless():
            return asyncio.run(_decode(engine, asked, seconds))

    answers = {
        "load": lambda version, data: asyncio.run(engine.load_adapter(version, data)),
        "sample": lambda: asyncio.run(sample()),
        "score": lambda: asyncio.run(engine.score(_prompt())),
        "decode": decode,
        "peak": lambda: torch.cuda.max_memory_reserved() / 2**30,
    }
    serve(pipe, answers)


async def _decode(engine: Any, asked: Any, seconds: float) -> float:
    """Tokens/s of so many sequences that are always decoding; their prompts are in the cache after a first time."""
    ends = time.perf_counter() + seconds
    started, before = time.perf_counter(), engine.load.computed_tokens

    async def one_after_another(request: Any) -> None:
        await engine.generate(request)
        while time.perf_counter() < ends:
            await engine.generate(request)

    streams = [asyncio.create_task(one_after_another(request)) for request in asked]
    if seconds:
        await asyncio.sleep(seconds)
    else:
        await asyncio.gather(*streams)
    tokens = engine.load.computed_tokens - before
    elapsed = time.perf_counter() - started
    await asyncio.gather(*streams)
    return float(tokens) / elapsed
