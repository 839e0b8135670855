"""A whole train step on a card, at the sizes of the recipe, against the memory plan."""

import math
import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.attention import SHARED, SIBLINGS
from benchmarks.gpu.stage import Found, Stage, found, need

if TYPE_CHECKING:
    from configs.run import RunConfig
    from learner.types import StepResult, TrainBatch

RECIPE = "dapo_qwen3_8b_a40.toml"
CARD = "A40"
TINY = (
    "learner.device=cpu",
    "learner.num_threads=1",
    "learner.microbatch_tokens=256",
    "rollout.engine.device=cpu",
    "rollout.engine.max_model_len=512",
    "rollout.max_steps=2",
    "rollout.max_turn_tokens=32",
    "prm.device=cpu",
    "card.shared=false",
    "model.lora_rank=8",
)
TWO_COPIES = ("card.share_base=false", "rollout.engine.kv_cache_gib=3", "rollout.engine.max_num_seqs=32")
"""Each process by itself, with weights of its own."""
UNGUARDED = (
    "learner.guard.min_effective_sample_share=0",
    "learner.guard.max_mismatch_k3_age0=1e9",
    "learner.guard.max_mismatch_k3_stale=1e9",
)
"""For samples whose log-probs are made up."""


def learner(stage: Stage) -> Found:
    """Train steps over trees of siblings, then one over a trajectory as long as may be; random weights."""
    need("pydantic", "peft", "xgrammar", "transformers")
    from benchmarks.gpu.synthetic import longest
    from learner.learner import Learner
    from tests.rollout.random_model import random_weights, write_folder

    sizes = "tiny" if stage.rehearsal else "qwen3-8b"
    config = recipe(stage, f"model.path={write_folder(stage.out / f'model-{sizes}', sizes)}", *UNGUARDED)
    cap(stage)
    folder, settings = _folder(config), config.learner
    base = random_weights(folder, device=settings.device, precision=settings.precision)
    trained = Learner(folder, config.model, settings, seed=0, base_weights=base)
    before = trained.adapter().digest
    batch = trees(config, trained.policy.vocab_size, count=1 if stage.rehearsal else 4)
    steps = [trained.train_step(batch) for _ in range(2)]
    steps.append(trained.train_step(longest(config.rollout.engine.max_model_len, trained.policy.vocab_size)))
    planned, context = plan_of(config, "learner")
    own = reserved_gib(stage) + (0.0 if stage.rehearsal else context)
    return found(
        {
            "loss_is_finite": all(math.isfinite(one.metrics["policy/loss"]) for one in steps),
            "weights_moved": trained.adapter().digest != before,
            "fused_attention": trained.policy.attention == "fused",
            "fused_adam": bool(trained.optimizer.state_dict()["param_groups"][0]["fused"]),
            "peak_gib": own,
            "packed_tokens_per_s": _speed(steps[1]),
        },
        planned={"learner": planned},
        steps=[dict(one.metrics) for one in steps],
        skipped=[one.skipped for one in steps],
        longest_tokens_per_s=_speed(steps[2]),
    )


def recipe(stage: Stage, *overrides: str) -> "RunConfig":
    """The recipe for one A40 with two copies of the base, in a rehearsal made tiny."""
    from configs.loading import RECIPES, load_run_config

    return load_run_config(RECIPES / RECIPE, [*TWO_COPIES, *(TINY if stage.rehearsal else ()), *overrides])


def _folder(config: "RunConfig") -> Any:
    from pathlib import Path

    return Path(config.model.path)


def plan_of(config: "RunConfig", name: str) -> tuple[float, float]:
    """GiB that `agentflow plan` gives a process, and those of them that no allocator sees."""
    from ray_jobs.plan.plan import make_plan

    plan, _ = make_plan(config, card=CARD)
    process = next(one for one in plan.processes if one.name == name)
    unseen = sum(part.num_bytes for part in process.parts if part.name == "CUDA context")
    return process.num_bytes / 2**30, unseen / 2**30


def cap(stage: Stage) -> None:
    """As if the card had no more than the one of the plan."""
    from ray_jobs.plan.run import card_bytes

    if stage.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, card_bytes(CARD) / total))


def reserved_gib(stage: Stage) -> float:
    """The most that this process had: of the card by its allocator, in a rehearsal of the machine."""
    if stage.device == "cuda":
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def trees(config: "RunConfig", vocab: int, *, count: int) -> "TrainBatch":
    """So many groups of siblings, each a microbatch of the size that the recipe allows."""
    from benchmarks.gpu.synthetic import samples
    from learner.packing import build_batch

    tokens = config.learner.microbatch_tokens
    shared = int(SHARED * tokens)
    groups: Sequence[Any] = [
        samples(siblings=SIBLINGS, shared=shared, own=(tokens - shared) // SIBLINGS, vocab=vocab, seed=seed)
        for seed in range(count)
    ]
    return build_batch([one for group in groups for one in group], microbatch_tokens=tokens)


def _speed(step: "StepResult") -> float:
    return step.metrics["learner/packed_tokens"] / step.metrics["learner/step_s"]
