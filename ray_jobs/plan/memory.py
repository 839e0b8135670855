"""How many bytes what needs: the formulas of `agentflow plan`. Pure: shapes and numbers in, bytes out.

Widths of a shape in the formulas: H hidden, Q and K of all queries and of all keys, I of the MLP, V vocabulary, r rank
of the adapter. Activations are in bfloat16 (2 bytes) but for norms, which are computed in float32 (4 bytes).
"""

from dataclasses import dataclass

from learner.packing import BLOCK_NODES
from ray_jobs.plan.shapes import ModelShape

GIB = 2**30
WEIGHTS = "weights"
"""The part that no setting makes smaller."""
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ADAM_BYTES = 16
"""Of a trained weight: itself, its gradient and AdamW's two moments, each in float32."""

SCORED_ROWS = 128
"""Tokens of the canary, which is scored; its text has about 90."""
SCORED_CHUNK = 1024
"""Rows of logits that vLLM makes at a time on a card where a prompt is scored; the chunk before lives until the next
is there."""

CUDA_CONTEXT = int(0.45 * GIB)
"""Of one process: the CUDA context, cuBLAS's workspace and loaded kernels. 0.3 to 0.5 GiB are usual."""
CUDA_GRAPHS = int(1.0 * GIB)
"""vLLM's captured graphs, with an adapter and without. It reports 0.5 GiB for an 8B model without adapters."""
FRAGMENTS = 0.05
"""What the caching allocator keeps besides the activations, as a share of them."""
CPU_PROCESS = {
    "engine": int(1.5 * GIB),
    "learner": int(0.8 * GIB),
    "prm": int(0.8 * GIB),
    "base weights": int(0.4 * GIB),
}
"""Of one process on a CPU: Python and the libraries, vLLM's among them in the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One line of the arithmetic."""

    name: str
    num_bytes: int
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """What a KV cache holds."""

    token_bytes: int
    num_tokens: int

    def num_sequences(self, length: int) -> int:
        """How many sequences of so many tokens fit at once."""
        return self.num_tokens // length


def weights(shape: ModelShape, dtype: str, cards: int = 1) -> Part:
    """Parameters x bytes of one, spread over so many cards."""
    return Part(
        name=WEIGHTS,
        num_bytes=shape.num_parameters * BYTES[dtype] // cards,
        arithmetic=f"{shape.num_parameters:,} parameters x {BYTES[dtype]} bytes ({dtype})" + _spread(cards),
    )


def _spread(cards: int) -> str:
    return f" / {cards} cards" if cards > 1 else ""


def kv_token_bytes(shape: ModelShape, dtype: str, cards: int = 1) -> int:
    """Of one token: layers x 2 (key and value) x kv_heads x head_dim x bytes. Cards divide the heads; each has at least
    one."""
    return shape.num_layers * 2 * max(1, shape.kv_heads // cards) * shape.head_dim * BYTES[dtype]


def kv_cache(shape: ModelShape, dtype: str, num_bytes: int, block_size: int, cards: int = 1) -> KvCache:
    """The cache is cut into blocks of `block_size` tokens; what is less than a block is lost."""
    token = kv_token_bytes(shape, dtype, cards)
    return KvCache(token_bytes=token, num_tokens=num_bytes // (token * block_size) * block_size)


def kv_arithmetic(shape: ModelShape, dtype: str, cards: int = 1) -> str:
    token, heads = kv_token_bytes(shape, dtype, cards) / 1024, max(1, shape.kv_heads // cards)
    return (
        f"{shape.num_layers} layers x 2 x {heads} heads x {shape.head_dim} x {BYTES[dtype]} bytes "
        f"= {token:g} KiB per token"
    )


def engine_adapters(num_lora: int, slots: int, dtype: str, cards: int = 1) -> Part:
    """vLLM reserves a place for every adapter it may hold: slots x LoRA parameters x bytes. Spread over cards, half of
    each adapter is on all of them."""
    whole = slots * num_lora * BYTES[dtype]
    return Part(
        name="adapter slots",
        num_bytes=whole if cards == 1 else whole // 2 + whole // 2 // cards,
        arithmetic=f"{slots} slots x {num_lora:,} LoRA parameters x {BYTES[dtype]} bytes" + _spread(cards),
    )


def engine_working(
    shape: ModelShape, dtype: str, batched_tokens: int, sampled_rows: int, rank: int, *, device: str
) -> Part:
    """The widest point of a step. A layer's MLP: residual and input (2 H), gate and up with their product (3 I), and
    the adapter's float32 intermediate of three slices (3 r), for every token of the step. Sampling: the logits in their
    own type, in float32, and twice as probabilities, for every row that is sampled. Scoring a prompt, on a card: the
    logits of all tokens of its step in their own type, two chunks at a time; on a CPU its own rows are treated as
    sampled ones."""
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
    """Adapter, gradient and AdamW's moments, all float32; ranks divide the moments."""
    return Part(
        name="adapter, gradient, AdamW",
        num_bytes=num_trained * (ADAM_BYTES - 8) + num_trained * 8 // ranks,
        arithmetic=f"{num_trained:,} LoRA parameters x (4 + 4 + 8{f' / {ranks}' if ranks > 1 else ''}) bytes",
    )


def adapter_copy(name: str, num_lora: int) -> Part:
    """An adapter that is not trained, or the bucket in which a rank collects its gradients for the others."""
    return Part(name=name, num_bytes=num_lora * 4, arithmetic=f"{num_lora:,} LoRA parameters x 4 bytes")


def kept_of_layer(shape: ModelShape, num_tokens: int, rank: int, *, device: str) -> int:
    """What one layer keeps for the backward pass, in bytes.

    Per token: two norms keep their input in float32 and their output (2 x (4 + 2) H); queries, the attention's blocks
    and their join (3 x 2 Q); the MLP's gate, its activation, up and their product (4 x 2 I); the adapters' inner
    products (7 x 2 r); the attention's normaliser (4 per head); with norms of queries and keys their float32 inputs
    (4 Q + 4 K). Each block of 128 queries keeps its own copy of the keys and values before it, widened to all heads
    (2 x 2 Q), and its mask: on average over one long sequence (N / 128 + 1) / 2 tokens' worth for every token.

    On a CPU, where the attention is not fused, a block keeps its weights (2 per head and key), and keys and values as
    they are (2 x 2 K), but neither mask nor normaliser nor what it read (2 Q).
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


def attention_gradient(shape: ModelShape, num_tokens: int, *, device: str) -> int:
    """What the gradient of the largest block's attention takes on a CPU, in bytes: 14 per head, query and key. A card's
    fused kernel keeps nothing of the kind."""
    if device != "cpu":
        return 0
    rest = num_tokens % BLOCK_NODES
    return 14 * shape.heads * max(BLOCK_NODES * (num_tokens - rest), rest * num_tokens)


def recomputed_layer(shape: ModelShape, num_tokens: int, rank: int, *, device: str) -> int:
    """The most that exists while one checkpointed layer is computed again and differentiated, in bytes.

    Per token, at the MLP's gradient: what the layer keeps without the attention's copies (12 H + 4 Q + 4 K + 8 I +
    14 r), two more values as wide as the MLP (2 x 2 I), the gradient that comes in (2 H) and the adapter's (2 r). On a
    CPU it may be more at the attention's: beside the block's, 10 H + 16 Q.
    """
    norms = 4 * (shape.query + shape.key) if shape.qk_norm else 0
    mlp = 14 * shape.hidden + 4 * (shape.query + shape.key) + 12 * shape.intermediate + 16 * rank
    block = attention_gradient(shape, num_tokens, device=device)
    beside = num_tokens * (10 * shape.hidden + 16 * shape.query) if block else 0
    return num_tokens * norms + max(num_tokens * mlp, block + beside)


def head_bytes(shape: ModelShape, num_tokens: int, chunk: int) -> int:
    """Last norm and log-probs, in bytes: the last layer's output and norm (8 H per token), then the larger of what a
    chunk of the logits needs (bfloat16, float32, and the chunk before in float32: 10 bytes each) beside 6 H per token,
    and of the gradient of the hidden states (24 H per token, if all of them are trained)."""
    logits = 10 * min(chunk, num_tokens) * shape.vocab
    return num_tokens * 8 * shape.hidden + max(logits + 6 * shape.hidden * num_tokens, 24 * shape.hidden * num_tokens)


def activations(shape: ModelShape, num_tokens: int, *, rank: int, checkpointing: bool, chunk: int, device: str) -> Part:
    """The most that one forward and backward pass of `num_tokens` holds at a time.

    With checkpointing every layer keeps its input (2 H per token), and on top come the log-probs, or one layer computed
    again. Without, every layer keeps all, and on top come the log-probs, or the MLP's first gradients (2 x 2 I + 2 H),
    or a block's attention where the MLP's values (8 I) are gone. `chunk` 0 is a model without logits, such as the PRM.
    """
    head = head_bytes(shape, num_tokens, chunk)
    layers = shape.num_layers
    if checkpointing:
        kept = layers * num_tokens * 2 * shape.hidden
        top = max(head, recomputed_layer(shape, num_tokens, rank, device=device))
        what = (
            f"{layers} layers x {num_tokens:,} tokens x {shape.hidden:,} x 2 bytes = {kept / GIB:.2f} GiB, "
            f"+ {top / GIB:.2f} GiB for one layer computed again"
        )
    else:
        kept = layers * kept_of_layer(shape, num_tokens, rank, device=device)
        block = attention_gradient(shape, num_tokens, device=device) - 8 * num_tokens * shape.intermediate
        top = max(head, num_tokens * (4 * shape.intermediate + 2 * shape.hidden), block)
        what = (
            f"{layers} layers x {kept / layers / GIB:.3f} GiB kept for {num_tokens:,} tokens, "
            f"+ {top / GIB:.2f} GiB for the log-probs"
        )
    return Part(name="activations", num_bytes=kept + top, arithmetic=what)


def scoring(shape: ModelShape, num_tokens: int) -> Part:
    """A pass without gradients, at its widest: the MLP's three values (3 x 2 I), input, residual and a float32 norm
    (8 H), and the widened keys and values of the last block (4 Q)."""
    per_token = 6 * shape.intermediate + 8 * shape.hidden + 4 * shape.query
    return Part(
        name="activations",
        num_bytes=num_tokens * per_token,
        arithmetic=f"{num_tokens:,} tokens x {per_token / 1024:.0f} KiB, no gradients",
    )


def fragments(part: Part) -> Part:
    return Part(
        name="allocator",
        num_bytes=int(part.num_bytes * FRAGMENTS),
        arithmetic=f"{FRAGMENTS:.0%} of the activations, for what the caching allocator keeps",
    )
