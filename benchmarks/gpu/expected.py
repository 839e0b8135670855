"""What the steps of `gpu_device` are expected to find on a card.

Where it says `estimated`, it is computed from a datasheet, with constants that an H100 gave: bounds are wide there, and
a value outside of them is news, not a fault. What must hold on any machine is judged in a rehearsal too.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card's datasheet: dense bfloat16 TFLOP/s, and GB/s of its memory."""

    name: str
    tflops: float
    gb_s: float


CARDS = (
    Card(name="A40", tflops=149.7, gb_s=696),
    Card(name="A100", tflops=312, gb_s=2039),
    Card(name="L40S", tflops=362, gb_s=864),
    Card(name="H200", tflops=989, gb_s=4800),
    Card(name="H100", tflops=989, gb_s=3350),
)


def card_of(name: str) -> Card:
    """By the name that CUDA gives a card; an unknown one is expected to do what an A40 does."""
    return next((card for card in CARDS if card.name in name), CARDS[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """`value` is what is expected, `least` and `most` what passes. `everywhere`: it is judged in a rehearsal too."""

    value: float | bool
    unit: str = ""
    least: float | None = None
    most: float | None = None
    everywhere: bool = False
    source: Literal["exact", "datasheet", "plan", "estimated"] = "estimated"

    def passes(self, measured: float | bool) -> bool:
        if isinstance(self.value, bool):
            return measured is self.value
        return (self.least is None or measured >= self.least) and (self.most is None or measured <= self.most)


TRUE = Expected(value=True, everywhere=True, source="exact")
ON_A_CARD = Expected(value=True, source="exact")


def at_most(value: float, unit: str, *, everywhere: bool = False, expected: float | None = None) -> Expected:
    """An error; less is better."""
    return Expected(value=value if expected is None else expected, unit=unit, most=value, everywhere=everywhere)


def about(value: float, unit: str, source: Literal["datasheet", "plan", "estimated"] = "estimated") -> Expected:
    """A peak of memory within 10% of the plan; a speed not below three quarters of what a datasheet promises or half of
    what was estimated; more speed is better."""
    if source == "plan":
        return Expected(value=value, unit=unit, least=0.9 * value, most=1.1 * value, source=source)
    return Expected(value=value, unit=unit, least=(0.75 if source == "datasheet" else 0.5) * value, source=source)


WEIGHT_BYTES = 15.1e9
"""Of Qwen3-8B, those that every decode step reads."""
TOKEN_BYTES = 147_456
"""Of its KV cache."""
STEP_FLOP = 1.9e14
"""Of the learner over 4,096 packed tokens, layers computed again."""


def decode_step_s(card: Card, running: int, live_tokens: int, *, ahead: bool) -> float:
    """Weights and cache at 87% of the memory's speed, 4 ms of LoRA and sampling at an A40's, and 4 ms of the host that
    a step scheduled ahead hides."""
    read = (WEIGHT_BYTES + running * live_tokens * TOKEN_BYTES) / (0.87e9 * card.gb_s)
    return read + 0.004 * 696 / card.gb_s + (0.0 if ahead else 0.004)


def learner_tokens_per_s(card: Card) -> float:
    """Of 4,096 packed tokens: products at 65% of the peak, attention and elementwise work as an H100 was seen to take,
    0.09 and 0.27 s, the first by a card's arithmetic and the second by its memory."""
    products_s = STEP_FLOP / (0.65e12 * card.tflops)
    return 4096 / (products_s + 0.09 * 989 / card.tflops + 0.27 * 3350 / card.gb_s)


def decoding(card: Card, *, running: int, live_tokens: int, ahead: bool, plan_gib: float) -> dict[str, Expected]:
    step_s = decode_step_s(card, running, live_tokens, ahead=ahead)
    return {
        "decode_step_ms": Expected(value=1e3 * step_s, unit="ms", most=2e3 * step_s),
        "sampled_tokens_per_s": about(running / step_s, "tokens/s"),
        "peak_gib": about(plan_gib, "GiB", "plan"),
    }


RUN = {
    "no_step_skipped": TRUE,
    "all_versions_proven": TRUE,
    "rate_rises": ON_A_CARD,
    "gap_nats": at_most(0.05, "nats", expected=0.02),
}


def expectations(step: str, card: Card, planned: dict[str, float]) -> dict[str, Expected]:
    """By the name of the measured value. `planned`: GiB of each process, as `agentflow plan` says it, where the step
    compares with it."""
    ahead_step = decode_step_s(card, 32, 1600, ahead=True)
    found: dict[str, dict[str, Expected]] = {
        "facts": {
            "bf16_tflops": about(0.8 * card.tflops, "TFLOP/s", "datasheet"),
            "copy_gb_s": about(0.88 * card.gb_s, "GB/s", "datasheet"),
            "shm_free_gib": Expected(value=2.0, unit="GiB", least=2.0),
        },
        "ipc": {
            "bytes_equal": TRUE,
            "one_memory": TRUE,
            "holder_outlives_mapper": TRUE,
            "mapped_again": TRUE,
            "mapper_gib": Expected(value=0.45, unit="GiB", most=1.0),
            "freed_after_both": ON_A_CARD,
        },
        "attention": {
            "fused_error": at_most(1e-2, "of the largest", everywhere=True),
            "blocks_error": at_most(1e-2, "of the largest", everywhere=True),
            "compiles": ON_A_CARD,
            "tree_speedup": Expected(value=4.0, unit="x of blocks", least=1.5),
        },
        "extension": {"loaded": ON_A_CARD},
        "learner": {
            "loss_is_finite": TRUE,
            "weights_moved": TRUE,
            "fused_attention": ON_A_CARD,
            "fused_adam": ON_A_CARD,
            "peak_gib": about(planned.get("learner", 0), "GiB", "plan"),
            "packed_tokens_per_s": about(learner_tokens_per_s(card), "tokens/s"),
        },
        "engine": {
            "follows_grammar": TRUE,
            "versions_right": TRUE,
            "own_version_is_nearest": TRUE,
            "gap_nats": at_most(0.05, "nats", everywhere=True, expected=0.01),
            "score_gap_nats": at_most(0.05, "nats", everywhere=True, expected=0.01),
        },
        "decoding": decoding(card, running=32, live_tokens=1600, ahead=True, plan_gib=planned.get("engine", 0))
        | {"stall_ms": Expected(value=300.0, unit="ms", most=1000.0)},
        "decoding-small-cache": decoding(
            card, running=10, live_tokens=1600, ahead=True, plan_gib=planned.get("engine", 0)
        ),
        "decoding-in-step": decoding(card, running=32, live_tokens=1600, ahead=False, plan_gib=planned.get("engine", 0))
        | {"decode_step_ms": Expected(value=1e3 * (ahead_step + 0.004), unit="ms", least=1e3 * ahead_step)},
        "together": {
            # Made-up weights: 36 random layers and steep logits enlarge what is rounded. A trained model's is in `run`.
            "gap_nats": at_most(0.5, "nats", everywhere=True, expected=0.25),
            "score_gap_nats": at_most(0.5, "nats", everywhere=True, expected=0.25),
            "own_version_is_nearest": TRUE,
            "card_gib": about(planned.get("all", 0), "GiB", "plan"),
            "sampled_beside_alone": Expected(value=0.5, unit="of alone", least=0.2),
            "trained_beside_alone": Expected(value=0.5, unit="of alone", least=0.2),
        },
        "run": RUN | {"trajectories_per_s": Expected(value=40.0, unit="/s", least=1.0)},
        "run-sync": RUN | {"trajectories_per_s": Expected(value=20.0, unit="/s", least=1.0)},
    }
    return found[step]
