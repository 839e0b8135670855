"""The speed of a run on one kind of card, scaled from what one H100 measured with Qwen3-8B (docs/results.md)."""

from dataclasses import dataclass

from configs.run import RunConfig
from ray_jobs.run.model_folder import ModelShape

CARDS = {
    "L4": (21.9, 121, 300),
    "A10": (22.1, 125, 600),
    "RTX 3090": (23.6, 71, 936),
    "RTX 4090": (23.6, 165, 1008),
    "RTX 5090": (31.4, 210, 1792),
    "A40": (44.3, 150, 696),
    "L40S": (44.3, 362, 864),
    "RTX A6000": (47.4, 155, 768),
    "RTX 6000 Ada": (47.4, 364, 960),
    "A100-40": (39.4, 312, 1555),
    "A100": (79.1, 312, 2039),
    "H100": (79.1, 989, 3350),
    "H200": (139.8, 989, 4800),
}
"""The GiB that CUDA reports, which are fewer than the name says; by the datasheets, dense bfloat16 TFLOP/s with float32
sums, and GB/s of memory."""
READ_SHARE, STEP_HOST_S = 0.85, 0.003
"""Share of the bandwidth at which a decode step reads weights and cache, and the seconds that it takes beside."""
PRODUCT_SHARE, PROMPT_SHARE = 0.57, 0.4
"""Shares of the FLOP/s that the learner's products reach, and, assumed, those of the engine's prompts."""
ELEMENTWISE_BYTES = 130
"""Bytes that other kernels of the learner move per token, layer, pass and unit of hidden and MLP width."""
LAUNCH_S = 2e-6
"""Seconds per token, layer and pass in which the host launches the learner's kernels, on any card."""
TOGETHER = 1.15
"""Work of engine and learner on one card, as a multiple of what one alone does in that time."""
LENGTH_SHARE, SAMPLED_SHARE, KEPT_SHARE = 1 / 3, 1 / 2, 1 / 2
"""Assumed: tokens of an attempt as a share of the longest, those of them that are sampled, groups with signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Estimated speeds of one engine and one learner, each alone on its card, and the time of a train step."""

    sampled_per_s: float
    """Sampled tokens, as many sequences at a time as the cache holds."""
    packed_per_s: float
    """Tokens of trained attempts."""
    step_s: float


def pace(config: RunConfig, shape: ModelShape, *, kv_token_bytes: int, kv_tokens: int, card: str) -> Pace | None:
    """Estimate the speed of a run with engines and learner on these cards; None if the card's speed is not known.

    Tools and the PRM take no time, as if other attempts always had work, and no prefix is shared or computed twice.
    """
    engine, learner = config.rollout.engine, config.learner
    if card not in CARDS or engine.device != "cuda" or learner.device != "cuda":
        return None
    _, tflops, gb_s = CARDS[card]
    flop_s, bytes_s = tflops * 1e12, gb_s * 1e9
    length = engine.max_model_len * LENGTH_SHARE
    running = max(1, min(engine.max_num_seqs, int(kv_tokens // length)))
    read = 2 * shape.num_parameters / engine.tensor_parallel + running * length * kv_token_bytes
    sampled_per_s = running / (read / (READ_SHARE * bytes_s) + STEP_HOST_S)
    products, width = 2 * shape.num_parameters, shape.num_layers * (shape.hidden + shape.intermediate)
    pass_s = max(products / (PRODUCT_SHARE * flop_s) + ELEMENTWISE_BYTES * width / bytes_s, LAUNCH_S * shape.num_layers)
    # The base is frozen: forward, the same again for checkpointing, and the gradients of inputs.
    packed_per_s = 1 / (pass_s * (3 if learner.gradient_checkpointing else 2))
    sampled = length * SAMPLED_SHARE
    attempt_s = sampled / sampled_per_s + (length - sampled) * products / (PROMPT_SHARE * flop_s)
    attempts = config.batch_groups * config.rollout.group_size
    engine_s = attempts / KEPT_SHARE * attempt_s / config.rollout.num_workers
    learner_s = attempts * length / packed_per_s / learner.num_workers
    alone = config.shares_card and config.rollout.num_workers == 1
    step_s = (engine_s + learner_s) / TOGETHER if alone else max(engine_s, learner_s)
    return Pace(sampled_per_s=sampled_per_s, packed_per_s=packed_per_s, step_s=step_s)
