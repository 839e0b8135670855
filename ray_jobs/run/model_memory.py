"""The shape of a model, from its config.json, and the bytes that engine, learner and PRM need for it.

Symbols in the formulas: H hidden size, Q and K the widths of all queries and of all keys, I the MLP's width, V the
vocabulary, r the adapter's rank. Activations are in bfloat16 (2 bytes) except norms, which are in float32 (4 bytes).
"""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import UserError, reason
from learner.packing import BLOCK_NODES

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCORED_CHUNK = 1024
"""Rows of logits that vLLM computes at a time when it scores a prompt; two chunks exist at once."""
KNOWN_MODELS = Path(__file__).with_name("models.toml")
FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder of the Llama or Qwen family."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    """May differ from hidden / heads."""
    vocab: int
    tied: bool
    """Whether the output head is the embedding."""
    biases: int
    """Biases of a block's linear layers, in all."""
    qk_norm: bool
    max_positions: int

    @property
    def query(self) -> int:
        """Return the width of all queries."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Return the width of all keys, which is that of all values."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of every linear layer of a block."""
        return {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key),
            "v_proj": (self.hidden, self.key),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def num_parameters(self) -> int:
        """Return the parameters of blocks, last norm and embedding (twice if the output head is not tied to it)."""
        layer = sum(inputs * outputs for inputs, outputs in self.linears.values())
        layer += self.biases + 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.num_layers * layer + self.hidden

    def lora_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """Return the parameters of A `[rank, inputs]` and B `[outputs, rank]` of every targeted linear layer."""
        if missing := [name for name in targets if name not in self.linears]:
            raise UserError(
                f"model.lora_targets names '{missing[0]}', and {self.name} only has {', '.join(self.linears)}"
            )
        return rank * self.num_layers * sum(sum(self.linears[name]) for name in targets)

    def check_cards(self, cards: int) -> None:
        """Check that each of the cards of an engine can hold an equal part of every layer's heads and MLP.

        With more cards than heads of keys, a head of keys is on several cards.
        """
        keys = self.kv_heads % cards == 0 or cards % self.kv_heads == 0
        if not keys or self.heads % cards or self.intermediate % cards:
            raise UserError(
                f"rollout.engine.tensor_parallel = {cards} does not divide {self.name}, which has {self.heads} heads "
                f"of queries, {self.kv_heads} of keys and {self.intermediate:,} values in its MLP; use a common divisor"
            )


def known_models() -> dict[str, dict[str, Any]]:
    """Return the configurations of models that `agentflow plan` knows without a download."""
    return tomllib.loads(KNOWN_MODELS.read_text())


def read_shape(file: Path, *, name: str) -> ModelShape:
    """Return the shape in the config.json of the model `name`."""
    try:
        return shape_of(json.loads(file.read_text()), name=name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read as a model's config.json: {reason(error)}") from error


def shape_of(config: dict[str, Any], *, name: str) -> ModelShape:
    """Return the shape of the model `name` with this config.json.

    Raises:
        UserError: The learner does not support the model.
        KeyError, TypeError, ValueError: The configuration is incomplete.
    """
    family = str(config.get("model_type", "none"))
    wrong = None
    if any("expert" in key for key in config) or "moe" in family:
        wrong = "is a mixture of experts, and only dense models are supported"
    elif "quantization_config" in config:
        wrong = "is quantized; name the same model with bfloat16 or float32 weights"
    elif family not in FAMILIES:
        wrong = f"has model_type '{family}'; supported are {', '.join(FAMILIES)}"
    elif config.get("use_sliding_window"):
        wrong = "has sliding-window attention, which the learner does not support"
    if wrong:
        raise UserError(f"{name} {wrong} (docs/your-model.md lists the models that train)")
    heads, hidden, intermediate = (
        int(config[key]) for key in ("num_attention_heads", "hidden_size", "intermediate_size")
    )
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    every = bool(config.get("attention_bias"))
    biases = (every or family == "qwen2") * (heads + 2 * kv_heads) * head_dim
    biases += (every and family != "qwen2") * hidden + bool(config.get("mlp_bias")) * (2 * intermediate + hidden)
    return ModelShape(
        name=name,
        num_layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        biases=biases,
        qk_norm=family == "qwen3",
        max_positions=int(config["max_position_embeddings"]),
    )


# ------------------------------------------------------------------------------------------ formulas


def weights(shape: ModelShape, dtype: str, cards: int = 1) -> int:
    """Compute parameters x bytes per parameter, divided by the cards."""
    return shape.num_parameters * BYTES[dtype] // cards


def kv_token_bytes(shape: ModelShape, dtype: str, cards: int = 1) -> int:
    """Compute the bytes of one token: layers x 2 (key and value) x kv_heads x head_dim x bytes per value.

    Cards divide the heads; each card has at least one.
    """
    return shape.num_layers * 2 * max(1, shape.kv_heads // cards) * shape.head_dim * BYTES[dtype]


def engine_working(shape: ModelShape, dtype: str, batched_tokens: int, sampled_rows: int, rank: int) -> int:
    """Compute the widest point of an engine's step on a card; on a CPU, where fewer rows are scored, it is lower.

    A layer's MLP: residual and input (2 H), gate, up and their product (3 I), and the adapter's float32 intermediate
    of three slices (3 r) for every token of the step. Sampling: the logits in their own type, in float32, and twice as
    probabilities, for every sampled row. Scoring a prompt: the logits of its tokens in their own type, two chunks at a
    time.
    """
    size = BYTES[dtype]
    tokens = batched_tokens * ((2 * shape.hidden + 3 * shape.intermediate) * size + 3 * rank * 4)
    scored = min(2 * SCORED_CHUNK, batched_tokens)
    return tokens + shape.vocab * (sampled_rows * (size + 3 * 4) + scored * size)


def adapter_training(num_trained: int, ranks: int = 1) -> int:
    """Compute adapter, gradient and AdamW's two moments in float32; learner ranks divide the moments."""
    return num_trained * (4 + 4) + num_trained * 8 // ranks


def activations(shape: ModelShape, num_tokens: int, *, rank: int, checkpointing: bool, chunk: int) -> int:
    """Compute the peak of one forward and backward pass over `num_tokens` on a card; on a CPU it is about as high.

    Without checkpointing every layer keeps per token: two norms' input in float32 and output (2 x (4 + 2) H); queries,
    the attention's blocks and their concatenation (3 x 2 Q); the MLP's gate, its activation, up and their product (4 x
    2 I); the adapters' inner products (7 x 2 r); the attention's normaliser (4 per head); with norms of queries and
    keys their float32 inputs (4 Q + 4 K). Each block of 128 queries keeps a copy of the keys and values before it,
    widened to all heads (2 x 2 Q), and its mask: on average over one long sequence (N / 128 + 1) / 2 tokens' worth for
    every token. On top are the log-probs, or the MLP's first gradients (2 x 2 I + 2 H).

    With checkpointing every layer keeps its input (2 H), and on top are the log-probs, or one layer computed again, at
    the MLP's gradient: what it keeps without the attention's copies (12 H + 4 Q + 4 K + 8 I + 14 r), two more values of
    the MLP's width (2 x 2 I), the incoming gradient (2 H) and the adapter's (2 r).

    Last norm and log-probs: the last layer's output and norm (8 H), then the larger of a chunk of logits (bfloat16,
    float32, and the previous chunk in float32: 10 bytes each) plus 6 H, and of the gradient of the hidden states (24
    H). `chunk` 0 is a model without logits, such as the PRM.
    """
    hidden, inner, query, key = shape.hidden, shape.intermediate, shape.query, shape.key
    logits = 10 * min(chunk, num_tokens) * shape.vocab
    head = 8 * hidden * num_tokens + max(logits + 6 * hidden * num_tokens, 24 * hidden * num_tokens)
    norms = 4 * (query + key) if shape.qk_norm else 0
    if checkpointing:
        again = 14 * hidden + 4 * (query + key) + 12 * inner + 16 * rank + norms
        return shape.num_layers * num_tokens * 2 * hidden + max(head, num_tokens * again)
    copies = (num_tokens / BLOCK_NODES + 1) / 2 * (4 * query + 2 * BLOCK_NODES)
    kept = 12 * hidden + 6 * query + 8 * inner + 14 * rank + 4 * shape.heads + norms + copies
    return int(shape.num_layers * num_tokens * kept) + max(head, num_tokens * (4 * inner + 2 * hidden))
