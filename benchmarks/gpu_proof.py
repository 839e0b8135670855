"""What one GPU does: attention, train steps and memory at Qwen3-8B's sizes, decoding, weight sync, and a complete run.

    python -m benchmarks.gpu_proof [--steps facts,attention,learner,decoding,run]
    python -m benchmarks.gpu_proof --out runs/rehearsal --rehearsal     # the same code on a CPU, at tiny sizes

Each step runs in its own process with a time limit and writes OUT/<step>.json (what it prints is in OUT/<step>.log).
Weights are random except in `run`, which trains the demo model. Steps that are done are not repeated.

    facts      the card, its speed in matrix products and copies, driver and libraries.
    attention  the learner's fused tree attention against padded attention: milliseconds, and error against float64.
    learner    train steps with the A40 recipe's settings: tokens/s, and the peak memory against `agentflow plan`.
    decoding   the recipe's engine: tokens/s, and how long decoding stalls while an adapter is loaded.
    run        cold start and RL with Ray's actors on one card that share one copy of the base weights.

The exit code is 1 if a step fails or a check is false.
"""

import argparse
import asyncio
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "configs" / "recipes" / "dapo_qwen3_8b_a40.toml"
CARD = "A40"
SIBLINGS, SHARED = 6, 0.4
"""Siblings of a tree, and the share of its tokens that they have in common."""
TINY = (
    *("learner.device=cpu", "learner.num_threads=1", "learner.microbatch_tokens=256", "rollout.engine.device=cpu"),
    *("rollout.engine.max_model_len=512", "agent.max_steps=2", "rollout.max_turn_tokens=32", "prm.device=cpu"),
    *("card.shared=false", "model.lora_rank=8"),
)
UNGUARDED = "learner.guard=false"
"""The guard would refuse samples whose log-probs are random."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where and at which size a step runs."""

    out: Path
    rehearsal: bool

    @property
    def device(self) -> str:
        return "cpu" if self.rehearsal else "cuda"

    def synchronize(self) -> None:
        if not self.rehearsal:
            torch.cuda.synchronize()

    def milliseconds(self, work: Callable[[], Any], repeats: int = 10) -> float:
        """Return the mean time of the work after warming up."""
        repeats = 1 if self.rehearsal else repeats
        for _ in range(0 if self.rehearsal else 3):
            work()
        self.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        self.synchronize()
        return 1e3 * (time.perf_counter() - started) / repeats

    def recipe(self, *overrides: str) -> Any:
        """Return the A40 recipe with separate weights for engine and learner, and a model of random weights."""
        from configs.loading import load_run_config
        from tests.rollout.random_model import write_folder

        model = write_folder(self.out / "model", "tiny" if self.rehearsal else "qwen3-8b")
        own = ("card.share_base=false", "rollout.engine.max_num_seqs=32", f"model.path={model}")
        return load_run_config(RECIPE, [*own, *(TINY if self.rehearsal else ()), *overrides])

    def cap(self) -> None:
        """Limit this process to the memory of the planned card."""
        if not self.rehearsal:
            from ray_jobs.plan import find_card

            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, find_card(CARD)[1] / total))

    def memory(self, config: Any, process: str) -> dict[str, float]:
        """Return the GiB that the plan gives a process and the GiB that this one reserved, both without CUDA itself."""
        from ray_jobs.plan import make_plan

        cards = make_plan(config, card=CARD).cards
        planned = next(one for card in cards for one in card.processes if one.name == process)
        outside = planned.parts.get("CUDA context", 0)
        reserved = 0 if self.rehearsal else torch.cuda.max_memory_reserved()
        return {"planned_gib": (planned.num_bytes - outside) / 2**30, "reserved_gib": reserved / 2**30}


def facts(stage: Stage) -> dict[str, Any]:
    side, copied = (256, 2**20) if stage.rehearsal else (8192, 2**32)
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=stage.device) for _ in range(2))
    source = torch.empty(copied, dtype=torch.uint8, device=stage.device)
    target = torch.empty_like(source)
    found: dict[str, Any] = {
        "bf16_tflops": 2e-9 * side**3 / stage.milliseconds(lambda: torch.mm(left, right)),
        "copy_gb_s": 2e-6 * copied / stage.milliseconds(lambda: target.copy_(source)),
        "torch": torch.__version__,
        "kernel": platform.release(),
    }
    if not stage.rehearsal:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found["card"] = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return found


def attention(stage: Stage) -> dict[str, Any]:
    """Time one layer forward and backward over a tree of siblings; compare with float64."""
    from torch.nn.attention.flex_attention import flex_attention_hop

    from learner import tree_attention

    def uncompiled(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, scale: float, **_: Any) -> Tensor:
        score = lambda score, batch, head, query, key: score  # noqa: E731
        return flex_attention_hop(query, key, value, score, block_mask.as_tuple(), scale, {})[0]

    def measured(num_nodes: int) -> dict[str, float]:
        ends, shared, scale = np.full(num_nodes, num_nodes), int(SHARED * num_nodes), width**-0.5
        for start, end in pairwise(np.linspace(shared, num_nodes, SIBLINGS + 1).astype(int)):
            ends[start:end] = end
        inputs = random_heads(stage, 1, num_nodes, heads, kv_heads, width)
        padded = random_heads(stage, SIBLINGS, shared + (num_nodes - shared) // SIBLINGS, heads, kv_heads, width)
        mask = tree_attention.interval_mask(ends, torch.device(stage.device))
        fused = lambda *qkv: tree_attention.fused_attention(*qkv, mask, scale)  # noqa: E731
        dense = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        return {
            "nodes": num_nodes,
            "fused_ms": stage.milliseconds(lambda: with_gradients(fused, inputs)),
            "padded_ms": stage.milliseconds(lambda: with_gradients(dense, padded)),
            "error": error(fused, inputs, ends, scale) if num_nodes <= 1024 else 0.0,
        }

    heads, kv_heads, width = (4, 2, 32) if stage.rehearsal else (32, 8, 128)
    with patch.object(tree_attention, "kernel", (lambda: uncompiled) if stage.rehearsal else tree_attention.kernel):
        rows = [measured(num_nodes) for num_nodes in ((256,) if stage.rehearsal else (1024, 4096, 8192))]
    return {"rows": rows, "check_error_small": max(row["error"] for row in rows) < 1e-2}


def random_heads(stage: Stage, batch: int, length: int, heads: int, kv_heads: int, width: int) -> list[Tensor]:
    generator = torch.Generator(stage.device).manual_seed(0)
    options: Any = {"generator": generator, "device": stage.device, "dtype": torch.bfloat16}
    return [torch.randn(batch, count, length, width, **options) for count in (heads, kv_heads, kv_heads)]


def with_gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), leaves)]


def error(way: Callable[..., Tensor], inputs: Sequence[Tensor], ends: np.ndarray, scale: float) -> float:
    """Return the largest mean deviation from float64 of output and gradients, relative to their mean size."""
    nodes = np.arange(len(ends))
    reads = torch.from_numpy((nodes[None] <= nodes[:, None]) & (nodes[:, None] < ends[None])).to(inputs[0].device)

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for one in (key, value))
        return torch.softmax((query @ key.transpose(2, 3) * scale).masked_fill(~reads, float("-inf")), dim=-1) @ value

    pairs = zip(with_gradients(way, inputs), with_gradients(exact, [one.double() for one in inputs]), strict=True)
    return max(float((one.double() - other).abs().mean() / other.abs().mean()) for one, other in pairs)


def samples(*, siblings: int, shared: int, own: int, vocab: int, seed: int = 0) -> list[Any]:
    """Return siblings of random tokens: a shared prompt, then `own` trained tokens each."""
    from tests.learner.tiny import sample

    rng = np.random.default_rng(seed)
    prompt, trained = rng.integers(100, vocab, shared), range(shared, shared + own)
    return [
        sample(np.concatenate([prompt, rng.integers(100, vocab, own)]), trained, name=f"{seed}/{index}")
        for index in range(siblings)
    ]


def learner(stage: Stage) -> dict[str, Any]:
    """Run train steps over trees of siblings, then one over the longest trajectory."""
    from learner.learner import Learner
    from learner.packing import build_batch
    from tests.rollout.random_model import random_weights

    config = stage.recipe(UNGUARDED)
    stage.cap()
    folder, settings, tokens = Path(config.model.path), config.learner, config.learner.microbatch_tokens
    base = random_weights(folder, device=settings.device, precision=settings.precision)
    trained = Learner(folder, config.model, settings, seed=0, base_weights=base)
    digest, vocab, shared = trained.adapter().digest, trained.policy.vocab_size, int(SHARED * tokens)
    own = (tokens - shared) // SIBLINGS
    groups = [samples(siblings=SIBLINGS, shared=shared, own=own, vocab=vocab, seed=seed) for seed in range(4)]
    batch = build_batch([one for group in groups for one in group], microbatch_tokens=tokens)
    length = config.rollout.engine.max_model_len
    longest = samples(siblings=1, shared=length // 2, own=length - length // 2, vocab=vocab)
    steps = [trained.train_step(batch) for _ in range(2)]
    steps.append(trained.train_step(build_batch(longest, microbatch_tokens=length)))
    rates = [step.metrics["learner/packed_tokens"] / step.metrics["learner/step_s"] for step in steps]
    return {
        "tokens_per_s": rates[1],
        "longest_tokens_per_s": rates[2],
        **stage.memory(config, "learner"),
        "check_finite": all(np.isfinite(step.metrics["policy/loss"]) for step in steps),
        "check_weights_moved": trained.adapter().digest != digest,
        "check_fused_attention": stage.rehearsal or trained.policy.attention == "fused",
    }


def requests(count: int, prompt_tokens: int, max_tokens: int) -> list[Any]:
    from rollout.engines.engine import GenerationRequest

    return [
        GenerationRequest(
            trajectory_id=f"t{index}",
            prompt_token_ids=tuple(10 + (index * 7919 + place * 31) % 480 for place in range(prompt_tokens)),
            max_tokens=max_tokens,
            temperature=1.0,
            seed=index,
        )
        for index in range(count)
    ]


def decoding(stage: Stage) -> dict[str, Any]:
    """Decode without and with adapters loaded meanwhile; every completion has its full length."""
    from rollout.engines.vllm import VllmEngine
    from tests.rollout.random_model import adapter_of

    config = stage.recipe(f"rollout.engine.kv_cache_gib={1 if stage.rehearsal else 17.7}")
    folder, loads = Path(config.model.path), 6
    adapters = [(version, adapter_of(folder, config.model.lora_rank, seed=version)) for version in range(1 + loads)]
    asked = requests(4, 64, 48) if stage.rehearsal else requests(32, 1500, 256)
    stage.cap()
    with random_engine_weights(), full_length():
        sampler = VllmEngine(folder, config.rollout.engine, config.model, seed=0)

        async def measured() -> tuple[dict[str, float], dict[str, float]]:
            await sampler.load_adapter(*adapters[0])
            await asyncio.gather(*(sampler.generate(replace(one, max_tokens=8)) for one in asked))
            return await decode(sampler, asked, ()), await decode(sampler, asked, adapters[1:])

        try:
            calm, disturbed = asyncio.run(measured())
        finally:
            sampler.close()
    return {"calm": calm, "with_loads": disturbed, "running": len(asked), **stage.memory(config, "engine")}


async def decode(sampler: Any, asked: Sequence[Any], adapters: Sequence[tuple[int, bytes]]) -> dict[str, float]:
    """Decode all requests at once and meanwhile load the adapters, one after the other, a few steps apart."""
    ends: list[float] = []
    step = sampler._step

    def timed_step() -> None:
        step()
        ends.append(time.perf_counter())

    started, loads = time.perf_counter(), []
    with patch.object(sampler, "_step", timed_step):
        tasks = [asyncio.create_task(sampler.generate(request)) for request in asked]
        for adapter in adapters:
            seen = len(ends)
            while len(ends) < seen + 4 and not all(task.done() for task in tasks):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            begin = time.perf_counter()
            await sampler.load_adapter(*adapter)
            loads.append((begin, time.perf_counter()))
        num_tokens = sum(len(completion.token_ids) for completion in await asyncio.gather(*tasks))
    seconds = time.perf_counter() - started
    gaps = list(pairwise(ends))
    usual = median(later - earlier for earlier, later in gaps)
    around = [max((b - a for a, b in gaps if a <= end and b >= begin), default=usual) for begin, end in loads]
    return {
        "tokens_per_s": num_tokens / seconds,
        "step_ms": 1e3 * usual,
        "load_ms": 1e3 * max((end - begin for begin, end in loads), default=0.0),
        "stall_ms": 1e3 * max((gap - usual for gap in around), default=0.0),
    }


@contextmanager
def random_engine_weights() -> Iterator[None]:
    """Let vLLM make up the weights of a folder that holds none."""
    import safetensors.torch

    from rollout.engines import adapters, vllm, vllm_parts

    unchecked = lambda _, adapter: safetensors.torch.load(adapter)  # noqa: E731
    with (
        patch.object(vllm_parts, "LOAD_FORMAT", "dummy"),
        patch.object(vllm, "check_weights"),
        patch.object(adapters.AdapterMerger, "_factors", unchecked),
    ):
        yield


@contextmanager
def full_length() -> Iterator[None]:
    from rollout.engines import vllm

    original = vllm.sampling_params

    def params(request: Any, *ends: Any) -> Any:
        made = original(request)
        made.ignore_eos = True
        return made

    with patch.object(vllm, "sampling_params", params):
        yield


def run(stage: Stage) -> dict[str, Any]:
    """Train the demo model on one card, engine and learner with one copy of the base weights."""
    from benchmarks.runs import train_steps

    sizes = (
        *("num_steps=24", "pipeline_depth=2", "evaluation.every_steps=0"),
        *("learner.device=cuda", "rollout.engine.device=cuda"),
        *("rollout.engine.adapter_mode=native", "rollout.engine.kv_cache_gib=4", "card.shared=true"),
        *("card.share_base=true", "rollout.num_workers=1", "rollout.engine.max_num_seqs=64"),
    )
    tiny = ("num_steps=1", "batch_groups=1", "agent.max_steps=5", "cold_start.num_demonstrations=104")
    own = (f"output_dir={stage.out}", "name=run", "reward.credit=outcome", "evaluation.num_tasks=32")
    recipe = str(RECIPE.with_name("demo_cpu.toml"))
    command = [sys.executable, "-m", "ray_jobs.cli", "train", recipe, *own, *(tiny if stage.rehearsal else sizes)]
    subprocess.run(command, check=True)
    folder = stage.out / "run"
    steps = train_steps(folder)
    summary = json.loads((folder / "summary.json").read_text())
    seconds = sum(row["time/step_s"] for row in steps)
    return {
        "trajectories_per_s": sum(row["rollout/trajectories"] for row in steps) / seconds,
        "rates": [row["rollout/solve_rate"] for row in steps if "rollout/solve_rate" in row],
        "gap_nats": summary["logprob_gap_version0"],
        "solved": [summary["solve_rate_before"], summary["solve_rate_after"]],
        "check_no_step_skipped": not any(row["policy/skipped"] for row in steps),
    }


STEPS: dict[str, tuple[Callable[[Stage], dict[str, Any]], int]] = {
    "facts": (facts, 90),
    "attention": (attention, 240),
    "learner": (learner, 300),
    "decoding": (decoding, 300),
    "run": (run, 900),
}
"""Functions and their time limits in seconds; a rehearsal has five times as long."""


def run_step(name: str, stage: Stage) -> dict[str, Any]:
    """Run a step in its own process group; end everything it started."""
    path = stage.out / f"{name}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--out", str(stage.out), "--only", name]
    limit_s = STEPS[name][1] * (5 if stage.rehearsal else 1)
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if name == "learner" else None
    with (stage.out / f"{name}.log").open("w") as log:
        child = subprocess.Popen(
            [*command, *["--rehearsal"] * stage.rehearsal],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        try:
            child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            print(f"{name} exceeded its limit of {limit_s} s", flush=True)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return dict(json.loads(path.read_text())) if path.exists() else {"failed": f"see {stage.out / name}.log"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-proof"), help="folder of the results")
    parser.add_argument("--steps", default=",".join(STEPS), help="comma-separated steps (default: all)")
    parser.add_argument("--rehearsal", action="store_true", help="run on the CPU at tiny sizes")
    parser.add_argument("--only", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    stage = Stage(out=options.out.absolute(), rehearsal=options.rehearsal)
    stage.out.mkdir(parents=True, exist_ok=True)
    if options.only:
        try:
            found = STEPS[options.only][0](stage)
        except Exception:
            traceback.print_exc()
            return 1
        (stage.out / f"{options.only}.json").write_text(json.dumps(found, indent=1))
        return 0
    bad = 0
    for name in options.steps.split(","):
        record = run_step(name, stage)
        print(f"{name}: {json.dumps(record)}", flush=True)
        bad += "failed" in record or any(value is False for key, value in record.items() if key.startswith("check_"))
    print(f"{bad} steps with a fault")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
