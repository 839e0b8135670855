"""The real path on one card, measured against its plan; on a machine without one, a rehearsal of the same steps.

    python -m benchmarks.gpu_proof --out runs/gpu-proof [--recipe configs/recipes/dapo_qwen3_8b_a40.toml] [--card A40]
        [--steps 6] [key=value ...]
    python -m benchmarks.gpu_proof --rehearse --out runs/rehearsal

Steps, each of which leaves its numbers in OUT/proof.json as soon as it is done:

    plan      what `agentflow plan` says of every process.
    async     a pipeline of few steps: Ray actors, vLLM, learner and PRM on the card of the recipe. Throughput, the gap
              of the log-probs at version 0, and each process's peak against its plan (target: within 10%), which for
              the learner is that of the longest trajectory: the demo's are short, so it trains on one in the end.
    sync      the RL phase again with pipeline_depth = 0 and the PRM of the run before.
    adapters  an engine that decodes while versions of the adapter are loaded: how long the decoding stands still.

On a GPU a process's peak is what PyTorch's allocator reserved at most, and the planned CUDA context beside it. The
rehearsal runs the demo model on the CPU, where the runs merge their adapters, the peak is the resident memory with all
libraries, and times say nothing of a GPU: it proves that the script works, and is marked as such in all that it writes.
Tasks are the demo's, generated with their plans, so neither keys nor a network are needed beside the model.
"""

import argparse
import asyncio
import gc
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.run import PATIENT
from benchmarks.gpu.sync_stall import Stall, measure, requests
from benchmarks.gpu.synthetic import longest
from configs.loading import RECIPES, load_run_config
from configs.run import RunConfig
from learner.types import TrainBatch
from ray_jobs.plan.plan import make_plan, plan_facts

GENERATED = (
    "envs.mix={ lookup = 1.0 }",
    'envs.search="offline"',
    "label.type=plan",
    "cold_start.num_demonstrations=104",
    "cold_start.learning_rate=1e-4",
    "evaluation.num_tasks=8",
    "collect.num_tasks=16",
    "max_empty_batches=60",
)
REHEARSAL = (
    *PATIENT,
    "batch_groups=1",
    "rollout.group_size=4",
    "rollout.max_steps=3",
    "rollout.max_turn_tokens=40",
    "rollout.format_retries=0",
    "rollout.engine.max_num_seqs=16",
    "rollout.engine.num_threads=1",
    "learner.num_threads=1",
    "learner.gradient_checkpointing=true",
    "cold_start.learning_rate=1e-3",
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
    recipe = RECIPES / "prm_cpu.toml" if options.rehearse else options.recipe
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
    from ray_jobs.phases.prm import learn_prm
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
        train_longest(run.actors.learner, config.rollout.engine.max_model_len)
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


def train_longest(learner: Any, num_tokens: int) -> None:
    """A step over one trajectory of so many tokens. They are few different ones, which any model knows."""
    import ray

    ray.get(learner.__ray_call__.remote(_train, longest(num_tokens, 1000)))


def _train(actor: Any, batch: TrainBatch) -> None:
    actor._learner.train_step(batch)


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
        adapters.append(learner.adapter(native.adapter_precision))
    del learner
    _empty_card()
    engine = VllmEngine(model_path, native, config.model, seed=config.seed)
    asked = requests(running, 64, 600 if on_card else 60)

    async def measured() -> Stall:
        (first, *others) = [(adapter.policy_version, adapter.data) for adapter in adapters]
        await engine.load_adapter(*first)
        return await measure(engine, asked, others)

    try:
        stall = asyncio.run(measured())
    finally:
        engine.close()
    return {"running": running, "adapter_bytes": len(adapters[0].data), **asdict(stall)}


def _empty_card() -> None:
    """Give back what the allocator of this process keeps of tensors that are gone."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
