"""The real path on one card, measured against its plan; on a machine without one, a rehearsal of the same steps.

    python benchmarks/gpu_proof.py --out runs/gpu-proof [--recipe configs/recipes/dapo_qwen3_8b_a40.toml] [--card A40]
        [--steps 6] [key=value ...]
    python benchmarks/gpu_proof.py --rehearse --out runs/rehearsal

Steps, each of which leaves its numbers in OUT/proof.json as soon as it is done:

    plan      what `agentflow plan` says of every process.
    async     a pipeline of few steps: Ray actors, vLLM, learner and PRM on the card of the recipe. Throughput, the gap
              of the log-probs at version 0, and each process's peak against its plan (target: within 10%).
    sync      the RL phase again with pipeline_depth = 0 and the PRM of the run before.
    adapters  an engine that decodes while versions of the adapter are loaded: how long the decoding stands still.

On a GPU a process's peak is what PyTorch's allocator reserved at most, and the planned CUDA context beside it. The
rehearsal runs the demo model on the CPU, where the runs merge their adapters, the peak is the resident memory with all
libraries, and times say nothing of a GPU: it proves that the script works, and is marked as such in all that it writes.
Tasks are the demo's, generated with their plans, so neither keys nor a network are needed beside the model.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.loading import RECIPES, load_run_config
from configs.run import RunConfig
from ray_jobs.plan.plan import make_plan, plan_facts

GENERATED = (
    "envs.mix={ lookup = 1.0 }",
    'envs.search="offline"',
    "label.type=plan",
    "cold_start.num_demonstrations=104",
    "cold_start.learning_rate=1e-3",
    "evaluation.num_tasks=8",
    "collect.num_tasks=16",
    "max_empty_batches=60",
)
REHEARSAL = (
    "batch_groups=1",
    "rollout.group_size=4",
    "rollout.max_steps=3",
    "rollout.max_turn_tokens=40",
    "rollout.format_retries=0",
    "rollout.engine.max_num_seqs=16",
    "rollout.engine.num_threads=1",
    "learner.num_threads=1",
    "learner.gradient_checkpointing=true",
    "collect.num_tasks=4",
    "collect.rollouts_per_task=2",
    "prm.model_path=demo",
    "prm.num_layers=2",
    "prm.max_tokens=256",
    "prm.num_epochs=1",
    "prm.num_threads=1",
)
TARGET = 0.10
ADAPTER_LOADS = 5


def proof_config(options: argparse.Namespace, name: str, *overrides: str) -> RunConfig:
    recipe = RECIPES / "chaos_cpu.toml" if options.rehearse else options.recipe
    own = REHEARSAL if options.rehearse else ()
    fixed = (f"output_dir={json.dumps(str(options.out))}", f"name={name}", f"num_steps={options.steps}")
    return load_run_config(recipe, [*GENERATED, *own, *fixed, *overrides, *options.overrides])


def plan_step(options: argparse.Namespace) -> dict[str, Any]:
    config = proof_config(options, "async")
    return plan_facts(*make_plan(config, card=options.card))


def run_step(options: argparse.Namespace, name: str, *overrides: str) -> dict[str, Any]:
    """A run's RL phase in numbers, and what each of its processes held at most."""
    from ray_jobs.phases.cold_start import cold_start
    from ray_jobs.phases.collect import collect
    from ray_jobs.phases.label import label
    from ray_jobs.phases.train_prm import learn_prm
    from ray_jobs.run.preflight import check_before_start
    from ray_jobs.run.run import open_run
    from ray_jobs.train import reinforce

    config = proof_config(options, name, *overrides)
    ready = check_before_start(config, with_prm=config.trains_prm)
    with open_run(config, ready, with_prm=config.trains_prm) as run:
        cold_start(run)
        if config.trains_prm:
            collected = collect(run)
            learn_prm(run, collected, label(run, collected))
        facts = reinforce(run)
        peaks = process_peaks(run.actors)
        seconds = run.folder.finished_phases["reinforce"]["seconds"]
        prm = str(run.folder.prm)
    return {
        "seconds": seconds,
        "trajectories_per_s": facts["num_trajectories"] / seconds,
        "sampled_tokens_per_s": facts["sampled_tokens"] / seconds,
        "learner_tokens_per_s": facts["packed_tokens"] / max(facts["learner_s"], 1e-9),
        "facts": dict(facts),
        "peaks": peaks,
        "prm_path": prm,
    }


def process_peaks(actors: Any) -> dict[str, dict[str, float]]:
    """Of learner, PRM and engine, asked in their own processes."""
    import ray

    asked = {"engine": actors.workers[0], "learner": actors.learner} | ({"PRM": actors.prm} if actors.prm else {})
    return {name: ray.get(actor.__ray_call__.remote(_own_peak)) for name, actor in asked.items()}


def _own_peak(_: Any) -> dict[str, float]:
    import resource

    import torch

    told = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        told |= {
            "reserved": float(torch.cuda.max_memory_reserved()),
            "allocated": float(torch.cuda.max_memory_allocated()),
            "card_used": float(total - free),
            "card_total": float(total),
        }
    return told


def adapters_step(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds between two steps of an engine in mode `native`, while nothing is loaded and while adapters are."""
    from configs.rollout import EngineConfig
    from learner.learner import Learner
    from ray_jobs.run.model_folder import resolve_model
    from rollout.engines.vllm import VllmEngine

    config = proof_config(options, "adapters")
    model_path = resolve_model(config.model.path)
    on_card = config.rollout.engine.device == "cuda"
    running = 16 if on_card else 2
    native = EngineConfig.model_validate(
        config.rollout.engine.model_dump() | {"adapter_mode": "native", "max_num_seqs": running, "max_model_len": 1024}
    )
    learner = Learner(model_path, config.model, config.learner, seed=config.seed)
    adapters = []
    for version in range(ADAPTER_LOADS + 1):
        learner.policy_version = version
        adapters.append(learner.adapter())
    del learner
    engine = VllmEngine(model_path, native, config.model, seed=config.seed)
    ends: list[float] = []
    step = engine._step

    def timed_step() -> None:
        step()
        ends.append(time.perf_counter())

    engine._step = timed_step  # type: ignore[method-assign]
    try:
        loads = asyncio.run(_load_while_decoding(engine, adapters, running, 600 if on_card else 60, ends))
    finally:
        engine.close()
    gaps = [later - earlier for earlier, later in pairwise(ends)]
    around = [max((b - a for a, b in pairwise(ends) if a <= end and b >= begin), default=0.0) for begin, end in loads]
    usual = median(gaps) if gaps else 0.0
    return {
        "running": running,
        "step_s": usual,
        "longest_gap_around_a_load_s": around,
        "stall_s": [max(0.0, gap - usual) for gap in around],
        "load_s": [end - begin for begin, end in loads],
        "adapter_bytes": len(adapters[0].data),
    }


async def _load_while_decoding(
    engine: Any, adapters: Sequence[Any], running: int, num_tokens: int, ends: list[float]
) -> list[tuple[float, float]]:
    from rollout.engines.engine import GenerationRequest

    await engine.load_adapter(adapters[0].policy_version, adapters[0].data)
    asked = GenerationRequest(
        trajectory_id="t", prompt_token_ids=tuple(range(100, 164)), max_tokens=num_tokens, temperature=1.0
    )
    requests = [replace(asked, trajectory_id=f"t{index}", seed=index) for index in range(running)]
    decoding = [asyncio.create_task(engine.generate(request)) for request in requests]
    loads = []
    for adapter in adapters[1:]:
        before = len(ends)
        while len(ends) < before + 4 and not all(task.done() for task in decoding):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        begin = time.perf_counter()
        await engine.load_adapter(adapter.policy_version, adapter.data)
        loads.append((begin, time.perf_counter()))
    await asyncio.gather(*decoding)
    return loads


def peak_rows(proof: dict[str, Any]) -> list[dict[str, Any]]:
    """Planned against measured bytes of each process, and their ratio."""
    rows = []
    for name, peak in proof["async"]["peaks"].items():
        parts = {
            part["name"]: part["num_bytes"]
            for card in proof["plan"]["cards"]
            for process in card["processes"]
            if process["name"] == name
            for part in process["parts"]
        }
        planned = sum(parts.values())
        measured = peak["reserved"] + parts.get("CUDA context", 0) if "reserved" in peak else peak["resident"]
        rows.append({"process": name, "planned": planned, "measured": measured, "ratio": measured / planned})
    return rows


def show(proof: dict[str, Any]) -> None:
    console, rehearsed = Console(), proof["rehearsed"]
    if rehearsed:
        console.print("REHEARSAL on the CPU: it proves the script, not the card.")
    table = Table(title="Peak of each process", title_justify="left")
    for column in ("process", "planned GiB", "measured GiB", "measured / planned"):
        table.add_column(column)
    for row in proof["peaks"]:
        table.add_row(
            row["process"], *(f"{row[key] / 2**30:.2f}" for key in ("planned", "measured")), f"{row['ratio']:.2f}"
        )
    console.print(table)
    table = Table(title="Speed", title_justify="left")
    for column in ("what", "value"):
        table.add_column(column)
    for row in proof["speed"].items():
        table.add_row(*map(str, row))
    console.print(table)
    if not rehearsed:
        within = all(abs(row["ratio"] - 1) <= TARGET for row in proof["peaks"])
        console.print(f"Peaks within {TARGET:.0%} of the plan: {'yes' if within else 'NO'}")


def conclude(proof: dict[str, Any]) -> None:
    asynchronous, synchronous, adapters = proof["async"], proof["sync"], proof["adapters"]
    proof["peaks"] = peak_rows(proof)
    proof["speed"] = {
        "RL phase, asynchronous, s": round(asynchronous["seconds"], 1),
        "RL phase, synchronous, s": round(synchronous["seconds"], 1),
        "trajectories/s, asynchronous": round(asynchronous["trajectories_per_s"], 2),
        "sampled tokens/s, asynchronous": round(asynchronous["sampled_tokens_per_s"]),
        "trained tokens/s of the learner": round(asynchronous["learner_tokens_per_s"]),
        "synchronous / asynchronous": round(synchronous["seconds"] / asynchronous["seconds"], 2),
        "mean |log-prob gap| at version 0, nats": asynchronous["facts"].get("logprob_gap_version0"),
        "engine step while decoding, ms": round(1e3 * adapters["step_s"], 1),
        "stall of decoding at add_lora, ms (median, longest)": (
            round(1e3 * median(adapters["stall_s"]), 1),
            round(1e3 * max(adapters["stall_s"]), 1),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and of proof.json")
    parser.add_argument("--recipe", type=Path, default=RECIPES / "dapo_qwen3_8b_a40.toml")
    parser.add_argument("--card", default="A40", help="as `agentflow plan` takes it")
    parser.add_argument("--steps", type=int, default=None, help="train steps (default 6, in a rehearsal 2)")
    parser.add_argument("--rehearse", action="store_true", help="the same steps on the CPU with the demo model")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    options.steps = options.steps or (2 if options.rehearse else 6)
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "proof.json"
    proof: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rehearsed": options.rehearse}
    if proof["rehearsed"] != options.rehearse:
        parser.error(f"{path} is of the other kind; choose another --out")
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "plan": lambda: plan_step(options),
        "async": lambda: run_step(options, "async", "pipeline_depth=2"),
        "sync": lambda: run_step(
            options, "sync", "pipeline_depth=0", f"reward.credit.prm_path={json.dumps(proof['async']['prm_path'])}"
        ),
        "adapters": lambda: adapters_step(options),
    }
    for name, step in steps.items():
        if name not in proof:
            proof[name] = step()
            path.write_text(json.dumps(proof, indent=2, default=str) + "\n")
    conclude(proof)
    path.write_text(json.dumps(proof, indent=2, default=str) + "\n")
    show(proof)


if __name__ == "__main__":
    main()
