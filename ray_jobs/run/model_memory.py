"""The shape of a model, from its config.json, and the bytes that engine, learner and PRM need for it.

Symbols in the formulas: H hidden size, Q and K the widths of all queries and of all keys, I the MLP's width, V the
vocabulary, r the adapter's rank. Activations are in bfloat16 (2 bytes) except norms, which are in float32 (4 bytes).
"""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.errors import UserError, did_you_mean, reason
from learner.demo_model import demo_model_dir
from learner.packing import BLOCK_NODES

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ADAM_BYTES = 16
"""Bytes per trained weight in float32: the weight, its gradient and AdamW's two moments."""
SCORED_ROWS = 128
"""The most tokens of a text that an engine on a CPU scores."""
SCORED_CHUNK = 1024
"""Rows of logits that vLLM computes at a time when it scores a prompt on a card; two chunks exist at once."""
CUDA_CONTEXT = int(0.45 * GIB)
"""One process's CUDA context, cuBLAS workspace and loaded kernels; 0.3 to 0.5 GiB are usual."""
CUDA_GRAPHS = int(1.0 * GIB)
"""vLLM's captured graphs, with and without an adapter; it reports 0.5 GiB for an 8B model without adapters."""
FRAGMENTS = 0.05
"""Memory that the caching allocator holds in addition to the activations, as a share of them."""
CPU_PROCESS = {
    "engine": int(1.5 * GIB),
    "learner": int(0.8 * GIB),
    "prm": int(0.8 * GIB),
    "base weights": int(0.4 * GIB),
}
"""Python and the libraries of one process on a CPU."""

KNOWN_MODELS = Path(__file__).with_name("models.toml")
DEMO = "HuggingFaceTB/SmolLM2-135M-Instruct"
FAMILIES = ("llama", "qwen2", "qwen3")
MOST_CARDS = 16


class PlanError(UserError):
    """A model that cannot be planned or trained, or a card that does not exist."""


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
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
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
        weights = sum(inputs * outputs for inputs, outputs in self.linears.values())
        biases = self.qkv_bias * (self.query + 2 * self.key) + self.o_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        layer = weights + biases + 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.num_layers * layer + self.hidden

    def lora_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """Return the parameters of A `[rank, inputs]` and B `[outputs, rank]` of every targeted linear layer."""
        if missing := [name for name in targets if name not in self.linears]:
            raise PlanError(
                f"model.lora_targets names '{missing[0]}', and {self.name} only has {', '.join(self.linears)}"
            )
        return rank * self.num_layers * sum(sum(self.linears[name]) for name in targets)

    def divides_over(self, cards: int) -> bool:
        """Return whether each card can hold an equal part of every layer's heads and MLP.

        With more cards than heads of keys, a head of keys is on several cards.
        """
        keys = self.kv_heads % cards == 0 or cards % self.kv_heads == 0
        return keys and self.heads % cards == 0 and self.intermediate % cards == 0

    def check_cards(self, cards: int) -> None:
        """Check that an engine can be spread over this number of cards."""
        if not self.divides_over(cards):
            fitting = " or ".join(str(count) for count in range(2, MOST_CARDS + 1) if self.divides_over(count))
            raise PlanError(
                f"rollout.engine.tensor_parallel = {cards} does not divide {self.name}, which has {self.heads} heads "
                f"of queries, {self.kv_heads} of keys and {self.intermediate:,} values in its MLP; use {fitting or 1}"
            )

    def cut(self, num_layers: int | None) -> "ModelShape":
        """Return the shape of the first layers; None keeps all."""
        return self if num_layers is None else replace(self, num_layers=min(num_layers, self.num_layers))


def find_shape(path: str, config_file: Path | None = None) -> ModelShape:
    """Return a model's shape from `config_file`, from its local folder, or from the known models, without a download.

    A model's instruction-tuned version has the shape of its base, except for the longest context.
    """
    if config_file is not None:
        return read_shape(_read_json(config_file), name=str(config_file))
    folder = demo_model_dir() if path == "demo" else Path(path).expanduser()
    if (folder / "config.json").is_file():
        return read_shape(_read_json(folder / "config.json"), name=path)

    def plain(name: str) -> str:
        return name.rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-base")

    known = known_models()
    for name, facts in known.items():
        if plain(name) == plain(DEMO if path == "demo" else path):
            return read_shape(facts["config"], name=path)
    raise PlanError(
        f"'{path}' is neither a model folder nor a known model ({', '.join(known)}); download its config.json and pass "
        f"it with --model-config FILE{did_you_mean(path, known)}"
    )


def known_models() -> dict[str, dict[str, Any]]:
    """Return the configurations of models that `agentflow plan` knows without a download."""
    return tomllib.loads(KNOWN_MODELS.read_text())


def read_shape(config: dict[str, Any], *, name: str) -> ModelShape:
    """Return the shape in a config.json; raise PlanError for a model that the learner does not support."""
    family = str(config.get("model_type", "none"))
    if any("expert" in key for key in config) or "moe" in family:
        raise PlanError(f"{name} is a mixture of experts; only dense models are supported")
    if "quantization_config" in config:
        raise PlanError(f"{name} is quantized; name the same model with bfloat16 or float32 weights")
    if family not in FAMILIES:
        raise PlanError(f"{name} has model_type '{family}'; supported are {', '.join(FAMILIES)}")
    if config.get("use_sliding_window"):
        raise PlanError(f"{name} has sliding-window attention, which the learner does not support")
    try:
        heads = int(config["num_attention_heads"])
        bias = bool(config.get("attention_bias", False))
        return ModelShape(
            name=name,
            num_layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias and family != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            max_positions=int(config["max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"config.json of {name} is incomplete or broken: {error!r}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as a model's config.json: {reason(error)}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{path} is not a model's config.json: it must hold an object")
    return config


# ------------------------------------------------------------------------------------------ formulas


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One line of the table: a named amount of memory and its arithmetic."""

    name: str
    num_bytes: int
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """The capacity of a KV cache."""

    token_bytes: int
    num_tokens: int

    def num_sequences(self, length: int) -> int:
        """Return the number of sequences of `length` tokens that fit at once."""
        return self.num_tokens // length


def weights(shape: ModelShape, dtype: str, cards: int = 1) -> Part:
    """Compute parameters x bytes per parameter, divided by the cards."""
    return Part(
        name="weights",
        num_bytes=shape.num_parameters * BYTES[dtype] // cards,
        arithmetic=f"{shape.num_parameters:,} parameters x {BYTES[dtype]} bytes ({dtype})" + _spread(cards),
    )


def _spread(cards: int) -> str:
    return f" / {cards} cards" if cards > 1 else ""


def kv_token_bytes(shape: ModelShape, dtype: str, cards: int = 1) -> int:
    """Compute the bytes of one token: layers x 2 (key and value) x kv_heads x head_dim x bytes per value.

    Cards divide the heads; each card has at least one.
    """
    return shape.num_layers * 2 * max(1, shape.kv_heads // cards) * shape.head_dim * BYTES[dtype]


def kv_cache(shape: ModelShape, dtype: str, num_bytes: int, block_size: int, cards: int = 1) -> KvCache:
    """Compute the capacity of a cache of whole blocks of `block_size` tokens."""
    token = kv_token_bytes(shape, dtype, cards)
    return KvCache(token_bytes=token, num_tokens=num_bytes // (token * block_size) * block_size)


def engine_adapters(num_lora: int, slots: int, dtype: str, cards: int = 1) -> Part:
    """Compute slots x LoRA parameters x bytes. Over several cards, half of each adapter is on all of them."""
    whole = slots * num_lora * BYTES[dtype]
    return Part(
        name="adapter slots",
        num_bytes=whole if cards == 1 else whole // 2 + whole // 2 // cards,
        arithmetic=f"{slots} slots x {num_lora:,} LoRA parameters x {BYTES[dtype]} bytes" + _spread(cards),
    )


def engine_working(
    shape: ModelShape, dtype: str, batched_tokens: int, sampled_rows: int, rank: int, *, device: str
) -> Part:
    """Compute the widest point of an engine's step.

    A layer's MLP: residual and input (2 H), gate, up and their product (3 I), and the adapter's float32 intermediate
    of three slices (3 r) for every token of the step. Sampling: the logits in their own type, in float32, and twice as
    probabilities, for every sampled row. Scoring a prompt on a card: the logits of its tokens in their own type, two
    chunks at a time; on a CPU, scored rows are treated like sampled ones.
    """
    tokens = batched_tokens * ((2 * shape.hidden + 3 * shape.intermediate) * BYTES[dtype] + 3 * rank * 4)
    on_card = device == "cuda"
    rows = sampled_rows if on_card else max(sampled_rows, SCORED_ROWS)
    scored = min(2 * SCORED_CHUNK, batched_tokens) if on_card else 0
    logits = shape.vocab * (rows * (BYTES[dtype] + 3 * 4) + scored * BYTES[dtype])
    return Part(
        name="working memory",
        num_bytes=tokens + logits,
        arithmetic=f"{batched_tokens:,} tokens x (2 x {shape.hidden:,} + 3 x {shape.intermediate:,}) x {BYTES[dtype]} "
        f"bytes + {rows} rows x {shape.vocab:,} logits x {BYTES[dtype] + 12} bytes"
        + (f" + {scored:,} scored rows x {shape.vocab:,} x {BYTES[dtype]} bytes" if scored else ""),
    )


def adapter_training(num_trained: int, ranks: int = 1) -> Part:
    """Compute adapter, gradient and AdamW's two moments in float32; learner ranks divide the moments."""
    return Part(
        name="adapter, gradient, AdamW",
        num_bytes=num_trained * (ADAM_BYTES - 8) + num_trained * 8 // ranks,
        arithmetic=f"{num_trained:,} LoRA parameters x (4 + 4 + 8{f' / {ranks}' if ranks > 1 else ''}) bytes",
    )


def adapter_copy(name: str, num_lora: int) -> Part:
    """Compute a frozen adapter, or the bucket in which a rank collects its gradients, in float32."""
    return Part(name=name, num_bytes=num_lora * 4, arithmetic=f"{num_lora:,} LoRA parameters x 4 bytes")


def kept_of_layer(shape: ModelShape, num_tokens: int, rank: int, *, device: str) -> int:
    """Compute the bytes that one layer keeps for the backward pass.

    Per token: two norms keep their input in float32 and their output (2 x (4 + 2) H); queries, the attention's blocks
    and their concatenation (3 x 2 Q); the MLP's gate, its activation, up and their product (4 x 2 I); the adapters'
    inner products (7 x 2 r); the attention's normaliser (4 per head); with norms of queries and keys their float32
    inputs (4 Q + 4 K). Each block of 128 queries keeps a copy of the keys and values before it, widened to all heads
    (2 x 2 Q), and its mask: on average over one long sequence (N / 128 + 1) / 2 tokens' worth for every token.

    On a CPU, where the attention is not fused, a block keeps its weights (2 per head and key), and keys and values
    without widening (2 x 2 K), but neither mask nor normaliser nor its inputs (2 Q).
    """
    per_token = 12 * shape.hidden + 4 * shape.query + 8 * shape.intermediate + 14 * rank
    copies = (num_tokens / BLOCK_NODES + 1) / 2
    if shape.qk_norm:
        per_token += 4 * (shape.query + shape.key)
    if device == "cpu":
        copied = 4 * shape.key + 2 * BLOCK_NODES * shape.heads
    else:
        per_token += 2 * shape.query + 4 * shape.heads
        copied = 4 * shape.query + 2 * BLOCK_NODES
    return int(num_tokens * (per_token + copies * copied))


def _attention_gradient(shape: ModelShape, num_tokens: int, *, device: str) -> int:
    """Compute the gradient of the largest block's attention on a CPU: 14 bytes per head, query and key.

    A card's fused kernel keeps none of it.
    """
    if device != "cpu":
        return 0
    rest = num_tokens % BLOCK_NODES
    return 14 * shape.heads * max(BLOCK_NODES * (num_tokens - rest), rest * num_tokens)


def recomputed_layer(shape: ModelShape, num_tokens: int, rank: int, *, device: str) -> int:
    """Compute the peak bytes while one checkpointed layer is computed again and differentiated.

    Per token, at the MLP's gradient: what the layer keeps without the attention's copies (12 H + 4 Q + 4 K + 8 I +
    14 r), two more values of the MLP's width (2 x 2 I), the incoming gradient (2 H) and the adapter's (2 r). On a CPU
    the peak may be at the attention's gradient: the block's, plus 10 H + 16 Q.
    """
    norms = 4 * (shape.query + shape.key) if shape.qk_norm else 0
    mlp = 14 * shape.hidden + 4 * (shape.query + shape.key) + 12 * shape.intermediate + 16 * rank
    block = _attention_gradient(shape, num_tokens, device=device)
    rest = num_tokens * (10 * shape.hidden + 16 * shape.query) if block else 0
    return num_tokens * norms + max(num_tokens * mlp, block + rest)


def activations(shape: ModelShape, num_tokens: int, *, rank: int, checkpointing: bool, chunk: int, device: str) -> Part:
    """Compute the peak of one forward and backward pass over `num_tokens`.

    With checkpointing every layer keeps its input (2 H per token), plus the log-probs or one layer computed again.
    Without, every layer keeps everything, plus the log-probs, or the MLP's first gradients (2 x 2 I + 2 H), or a
    block's attention when the MLP's values (8 I) are freed.

    Last norm and log-probs: the last layer's output and norm (8 H per token), then the larger of a chunk of logits
    (bfloat16, float32, and the previous chunk in float32: 10 bytes each) plus 6 H per token, and of the gradient of
    the hidden states (24 H per token). `chunk` 0 is a model without logits, such as the PRM.
    """
    logits = 10 * min(chunk, num_tokens) * shape.vocab
    head = num_tokens * 8 * shape.hidden
    head += max(logits + 6 * shape.hidden * num_tokens, 24 * shape.hidden * num_tokens)
    layers = shape.num_layers
    if checkpointing:
        kept = layers * num_tokens * 2 * shape.hidden
        top = max(head, recomputed_layer(shape, num_tokens, rank, device=device))
        text = (
            f"{layers} layers x {num_tokens:,} tokens x {shape.hidden:,} x 2 bytes = {kept / GIB:.2f} GiB, "
            f"+ {top / GIB:.2f} GiB for one layer computed again"
        )
    else:
        kept = layers * kept_of_layer(shape, num_tokens, rank, device=device)
        block = _attention_gradient(shape, num_tokens, device=device) - 8 * num_tokens * shape.intermediate
        top = max(head, num_tokens * (4 * shape.intermediate + 2 * shape.hidden), block)
        text = (
            f"{layers} layers x {kept / layers / GIB:.3f} GiB kept for {num_tokens:,} tokens, "
            f"+ {top / GIB:.2f} GiB for the log-probs"
        )
    return Part(name="activations", num_bytes=kept + top, arithmetic=text)


def scoring(shape: ModelShape, num_tokens: int) -> Part:
    """Compute the peak of a pass without gradients.

    The MLP's three values (3 x 2 I), input, residual and a float32 norm (8 H), and the widened keys and values of the
    last block (4 Q).
    """
    per_token = 6 * shape.intermediate + 8 * shape.hidden + 4 * shape.query
    return Part(
        name="activations",
        num_bytes=num_tokens * per_token,
        arithmetic=f"{num_tokens:,} tokens x {per_token / 1024:.0f} KiB, no gradients",
    )
