"""`agentflow plan`: the memory that a run needs, on which card, and whether it fits.

Symbols in the formulas: H hidden size, Q and K the widths of all queries and of all keys, I the MLP's width, V the
vocabulary, r the adapter's rank. Activations are in bfloat16 (2 bytes).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from configs.base import fastest_precision
from configs.errors import UserError
from configs.learner import LOGIT_CHUNK_TOKENS
from configs.loading import set_value
from configs.run import BASE_SHARE, RANK_SHARE, RunConfig
from learner.packing import BLOCK_NODES
from ray_jobs.run.console import duration
from ray_jobs.run.model_folder import ModelShape, find_shape
from ray_jobs.run.origin import memory_bytes
from ray_jobs.run.pace import CARDS, pace
from rollout.engines.vllm_parts import MAX_LORAS, batched_tokens, kv_block, kv_cache_bytes

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCORED_CHUNK = 1024
"""Rows of logits that vLLM computes at a time when it scores a prompt; two chunks exist at once."""
LARGEST_GIB = 512
HEADROOM = int(0.5 * GIB)
"""Memory that must remain free, because the formulas are approximate."""
CUDA_CONTEXT = int(0.45 * GIB)
"""One process's CUDA context, cuBLAS workspace and loaded kernels; 0.3 to 0.5 GiB are usual."""
CUDA_GRAPHS = int(1.0 * GIB)
"""vLLM's captured graphs, with and without an adapter; it reports 0.5 GiB for an 8B model without adapters."""
FRAGMENTS = 0.05
"""Memory that the caching allocator holds in addition to the activations, as a share of them."""
LIBRARIES_GIB = {"engine": 1.5, "learner": 0.8, "PRM": 0.8, "base weights": 0.4}
"""Python and the libraries of one process on a CPU."""
SETTINGS = {
    "engine": "rollout.engine.kv_cache_gib or rollout.engine.max_model_len",
    "learner": "learner.gradient_checkpointing=true or learner.microbatch_tokens",
    "PRM": "prm.gradient_checkpointing=true or prm.microbatch_tokens",
    "base weights": "model.path",
}
"""The one or two settings that decide most of each process's memory."""
SAVINGS = (
    ("learner.gradient_checkpointing", True),
    ("prm.gradient_checkpointing", True),
    ("card.share_base", True),
)
"""Settings that save memory and cost time only, in the order in which they are tried."""
KV_STEP_GIB = 0.5


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the run and its memory."""

    name: str
    device: str
    parts: dict[str, int]
    """Bytes."""
    share: float
    """The share of a card that it claims, on `cuda`."""

    @property
    def num_bytes(self) -> int:
        """Return the sum of its parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Card:
    """A card, or the memory of a machine, and the processes on it."""

    name: str
    num_bytes: int
    processes: tuple[Process, ...]

    @property
    def free(self) -> int:
        """Return the free bytes; negative if the processes do not fit."""
        return self.num_bytes - sum(process.num_bytes for process in self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The memory of a run."""

    policy: ModelShape
    kv_token_bytes: int
    kv_tokens: int
    """The capacity of an engine's KV cache."""
    kv_sequences: int
    """Sequences of `rollout.engine.max_model_len` that fit into it at once."""
    cards: tuple[Card, ...]
    refusals: tuple[str, ...]
    """The reasons why the run does not fit, each with the settings to change; empty if it fits."""


def find_card(card: str) -> tuple[str, int]:
    """Return the name and the bytes of a card: a product name (`RTX 4090`, `rtx-4090`, `4090`) or a number of GiB."""
    for name, (gib, *_) in CARDS.items():
        if _plain(name) == _plain(card):
            return name, int(gib * GIB)
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(?:gb|gib)?", card.lower())
    if number is None or not 0 < float(number[1]) <= LARGEST_GIB:
        raise UserError(f"--card '{card}' is neither a number of GiB up to {LARGEST_GIB} nor one of {', '.join(CARDS)}")
    return f"a card of {float(number[1]):g} GiB", int(float(number[1]) * GIB)


def _plain(card: str) -> str:
    return re.sub(r"nvidia|geforce|rtx|[^a-z0-9]", "", card.lower())


def make_plan(config: RunConfig, *, card: str) -> RunPlan:
    """Compute the memory of a run. `card` is the name or the GiB of the card for processes on `cuda`.

    With card.shared, learner, PRM and one engine are on one card, and each further engine on another. Otherwise each
    process is limited to its share of a card, because Ray may place others on the same one.
    """
    name, whole = find_card(card)
    trained = config.reward.prm_path
    if trained and Path(trained, "prm.json").is_file():
        from reward.prm.model import prm_in_use

        config = config.model_copy(update={"prm": prm_in_use(config)})
    shape, engine = find_shape(config.model.path), config.rollout.engine
    shape.check_cards(engine.tensor_parallel)
    once = [_engine(config, shape, reads_base=config.shares_base), _learner(config, shape)]
    if config.shares_base:
        device = config.learner.device
        parts = {"weights": weights(shape, config.learner.precision)} | _overhead("base weights", device)
        once.insert(0, Process("base weights", device, parts, BASE_SHARE))
    if config.reward.prm is not None:
        once.append(_prm(config))
    further = [_engine(config, shape, reads_base=False)] * (config.rollout.num_workers - 1)
    ranks = [_learner(config, shape)] * (config.learner.num_workers - 1)
    on_cpu = [process for process in once + further + ranks if process.device == "cpu"]
    on_card = [process for process in once if process.device == "cuda"]
    cards = []
    if on_card and config.shares_card:
        cards.append(Card(name, whole, tuple(on_card)))
        on_card = further[:1]
    for process in on_card:
        cards.append(Card(f"{process.share:g} of {name}", int(process.share * whole), (process,)))
    if on_cpu:
        cards.append(Card("this machine", memory_bytes(), tuple(on_cpu)))
    token = kv_token_bytes(shape, engine.precision, engine.tensor_parallel)
    block = kv_block(engine.device)
    tokens = kv_cache_bytes(engine) // (token * block) * block
    refusals = (*_length_refusals(config, shape, tokens), *map(partial(_memory_refusal, config), cards))
    return RunPlan(
        policy=shape,
        kv_token_bytes=token,
        kv_tokens=tokens,
        kv_sequences=tokens // engine.max_model_len,
        cards=tuple(cards),
        refusals=tuple(filter(None, refusals)),
    )


def _length_refusals(config: RunConfig, shape: ModelShape, kv_tokens: int) -> Iterator[str]:
    length = config.rollout.engine.max_model_len
    if length > shape.max_positions:
        yield (
            f"rollout.engine.max_model_len = {length} is longer than the {shape.max_positions} positions of "
            f"{shape.name}; set it to at most that"
        )
    if kv_tokens < length:
        yield (
            f"rollout.engine.kv_cache_gib = {config.rollout.engine.kv_cache_gib:g} holds {kv_tokens:,} tokens, "
            f"less than one sequence of rollout.engine.max_model_len = {length:,}; raise the first or lower the second"
        )


def _memory_refusal(config: RunConfig, card: Card) -> str | None:
    if card.free >= HEADROOM:
        return None
    needs = ", ".join(f"{process.name} {process.num_bytes / GIB:.2f}" for process in card.processes)
    largest = max(card.processes, key=lambda process: process.num_bytes)
    settings = SETTINGS[largest.name]
    if largest.device == "cuda" and not config.card.shared:
        settings += f", or raise card.{largest.name.lower()}"
    return (
        f"{card.name} has {card.num_bytes / GIB:.2f} GiB and needs {(HEADROOM - card.free) / GIB:.2f} more ({needs}, "
        f"{HEADROOM / GIB:g} of head-room); for the {largest.name} change {settings}, or use a larger card"
    )


def _engine(config: RunConfig, shape: ModelShape, *, reads_base: bool) -> Process:
    """Compute vLLM: base weights, adapter slots, KV cache, a step's working memory, CUDA graphs.

    Of an engine over several cards, which has them alone, this is one card. On a CPU it always packs its own copy of
    the base weights.
    """
    engine, rank = config.rollout.engine, config.model.lora_rank
    cards, on_card = engine.tensor_parallel, engine.device == "cuda"
    parts = {} if reads_base and on_card else {"weights": weights(shape, engine.precision, cards)}
    if engine.adapter_mode == "native":
        # Over several cards, half of each adapter is on all of them.
        half = MAX_LORAS * shape.lora_parameters(rank, config.model.lora_targets) * BYTES[engine.precision] // 2
        parts["adapter slots"] = half + half // cards
    parts["KV cache"] = kv_cache_bytes(engine)
    tokens, rows = batched_tokens(engine), engine.max_num_seqs
    parts["working memory"] = engine_working(shape, engine.precision, tokens, rows, rank)
    if on_card:
        parts["CUDA graphs"] = CUDA_GRAPHS
    parts |= _overhead("engine", engine.device)
    return Process("engine", engine.device, parts, config.card.engine if cards == 1 else 1.0)


def _learner(config: RunConfig, shape: ModelShape) -> Process:
    """Compute the learner: base weights unless shared, the adapter's training, one microbatch.

    A trajectory longer than a microbatch is trained alone, so the longest one counts too. Of several ranks this is
    one; they divide the optimizer's moments.
    """
    learner, model, ranks = config.learner, config.model, config.learner.num_workers
    num_lora = shape.lora_parameters(model.lora_rank, model.lora_targets)
    parts = {} if config.shares_base else {"weights": weights(shape, learner.precision)}
    parts["adapter, gradient, AdamW"] = adapter_training(num_lora, ranks)
    if ranks > 1:
        parts["gradient bucket"] = 4 * num_lora
    if learner.has_reference:
        parts["reference adapter"] = 4 * num_lora
    parts["activations"] = activations(
        shape,
        max(learner.microbatch_tokens, config.rollout.engine.max_model_len),
        rank=model.lora_rank,
        checkpointing=learner.gradient_checkpointing,
        chunk=LOGIT_CHUNK_TOKENS,
    )
    parts["allocator"] = int(FRAGMENTS * parts["activations"])
    share = config.card.learner - BASE_SHARE * config.shares_base if ranks == 1 else RANK_SHARE
    return Process("learner", learner.device, parts | _overhead("learner", learner.device), share)


def _prm(config: RunConfig) -> Process:
    """Compute the PRM: trained in the run, or only scoring if the recipe names a trained one."""
    prm = config.prm
    shape = find_shape(prm.model_path, key="prm.model_path")
    if prm.num_layers is not None:
        shape = replace(shape, num_layers=min(prm.num_layers, shape.num_layers))
    num_lora = shape.lora_parameters(prm.lora_rank, tuple(shape.linears))
    tokens = max(prm.microbatch_tokens, prm.max_tokens)
    parts = {"weights": weights(shape, fastest_precision(prm.device))}
    if config.reward.prm_path:
        # Without gradients: the MLP's three values in bfloat16, input, residual and a float32 norm, and the widened
        # keys and values of the last block.
        scored = tokens * (6 * shape.intermediate + 8 * shape.hidden + 4 * shape.query)
        parts |= {"adapter": 4 * num_lora, "activations": scored}
    else:
        parts["adapter, gradient, AdamW"] = adapter_training(num_lora)
        parts["activations"] = activations(
            shape, tokens, rank=prm.lora_rank, checkpointing=prm.gradient_checkpointing, chunk=0
        )
    parts["allocator"] = int(FRAGMENTS * parts["activations"])
    return Process("PRM", prm.device, parts | _overhead("PRM", prm.device), config.card.prm)


def _overhead(name: str, device: str) -> dict[str, int]:
    return {"CUDA context": CUDA_CONTEXT} if device == "cuda" else {"libraries": int(LIBRARIES_GIB[name] * GIB)}


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

    Without checkpointing every layer keeps per token: two norms' input and output (2 x (2 + 2) H); queries, the
    attention's blocks and their concatenation (3 x 2 Q); the MLP's gate, its activation, up and their product (4 x 2
    I); the adapters' inner products (7 x 2 r); the attention's normaliser (4 per head); with norms of queries and keys
    their inputs (2 Q + 2 K). Each block of 128 queries keeps a copy of the keys and values before it,
    widened to all heads (2 x 2 Q), and its mask: on average over one long sequence (N / 128 + 1) / 2 tokens' worth for
    every token. On top are the log-probs, or the MLP's first gradients (2 x 2 I + 2 H).

    With checkpointing every layer keeps its input (2 H), and on top are the log-probs, or one layer computed again, at
    the MLP's gradient: what it keeps without the attention's copies (8 H + 4 Q + 4 K + 8 I + 14 r), two more values of
    the MLP's width (2 x 2 I), the incoming gradient (2 H) and the adapter's (2 r).

    Last norm and log-probs: the last layer's output and norm (6 H), then the larger of a chunk of logits (bfloat16,
    float32, and the previous chunk in float32: 10 bytes each) plus 6 H, and of the gradient of the hidden states (24
    H). `chunk` 0 is a model without logits, such as the PRM.
    """
    hidden, inner, query, key = shape.hidden, shape.intermediate, shape.query, shape.key
    logits = 10 * min(chunk, num_tokens) * shape.vocab
    head = 6 * hidden * num_tokens + max(logits + 6 * hidden * num_tokens, 24 * hidden * num_tokens)
    norms = 2 * (query + key) if shape.qk_norm else 0
    if checkpointing:
        again = 10 * hidden + 4 * (query + key) + 12 * inner + 16 * rank + norms
        return shape.num_layers * num_tokens * 2 * hidden + max(head, num_tokens * again)
    copies = (num_tokens / BLOCK_NODES + 1) / 2 * (4 * query + 2 * BLOCK_NODES)
    kept = 8 * hidden + 6 * query + 8 * inner + 14 * rank + 4 * shape.heads + norms + copies
    return int(shape.num_layers * num_tokens * kept) + max(head, num_tokens * (4 * inner + 2 * hidden))


def advice(config: RunConfig, *, card: str) -> Mapping[str, object]:
    """Return the settings with which a run fits that does not, or that use what a run leaves of its engine's card.

    The first of SAVINGS that suffice are taken, then the size of the KV cache is adjusted. Empty if nothing is to be
    gained, or if no size of the cache that holds one longest sequence fits.
    """
    changes: dict[str, object] = {}
    plan = make_plan(config, card=card)
    for key, value in SAVINGS:
        if not plan.refusals:
            break
        try:
            saving = _changed(config, {key: value})
            saved = make_plan(saving, card=card)
        except ValueError:
            continue  # The run cannot have this setting.
        if sum(min(0, one.free) for one in saved.cards) > sum(min(0, one.free) for one in plan.cards):
            config, plan, changes = saving, saved, {**changes, key: value}
    with_engine = [one for one in plan.cards if any(process.name == "engine" for process in one.processes)]
    spare_gib = min(one.free - HEADROOM for one in with_engine) / GIB
    engine = config.rollout.engine
    if plan.refusals or (engine.device == "cuda" and spare_gib >= 1 and plan.kv_sequences < engine.max_num_seqs):
        enough = engine.max_num_seqs * engine.max_model_len * plan.kv_token_bytes / GIB
        size = min(engine.kv_cache_gib + spare_gib, math.ceil(enough / KV_STEP_GIB) * KV_STEP_GIB)
        changes["rollout.engine.kv_cache_gib"] = math.floor(size / KV_STEP_GIB) * KV_STEP_GIB
        if size < KV_STEP_GIB or make_plan(_changed(config, changes), card=card).refusals:
            return {}
    return changes


def _changed(config: RunConfig, changes: Mapping[str, object]) -> RunConfig:
    """Return the config with other values of some settings. Raises ValidationError."""
    values = config.model_dump(mode="json")
    for key, value in changes.items():
        set_value(values, key, value)
    return RunConfig.model_validate(values)


def run_plan(config: RunConfig, *, card: str | None) -> int:
    """Print the plan. Return 1 if the run does not fit."""
    card_name = card or "A40"
    plan, console = make_plan(config, card=card_name), Console()
    if card and not any(process.device == "cuda" for planned in plan.cards for process in planned.processes):
        raise UserError(f"--card {card} has no effect: nothing of this recipe runs on 'cuda'; leave it out")
    # Paths may hold square brackets, and settings to copy must stay on one line.
    write = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    if card is None and any(process.device == "cuda" for planned in plan.cards for process in planned.processes):
        write("Planned for an A40; name another card with --card.")
    for refusal in plan.refusals or ("It fits.",):
        write(f"It does not fit: {refusal}." if plan.refusals else refusal)
    changes = " ".join(f"{key}={str(value).lower()}" for key, value in advice(config, card=card_name).items())
    if plan.refusals:
        none_fits = "No KV cache fits: take a larger card, a smaller model or a lower rollout.engine.max_model_len"
        write(f"It fits with {changes}" if changes else none_fits)
    elif changes:
        write(f"More attempts play side by side with {changes}")
    if plan.kv_sequences < config.rollout.group_size:
        write(
            f"A group of rollout.group_size = {config.rollout.group_size} may wait for itself: the KV cache holds "
            f"{plan.kv_sequences} of the longest sequences at a time"
        )
    shape = plan.policy
    write(
        f"{shape.name}: {shape.num_parameters:,} parameters in {shape.num_layers} layers; KV cache: "
        f"{plan.kv_token_bytes / 1024:g} KiB per token, {plan.kv_sequences} of the longest sequences at a time"
    )
    sizes = {"kv_token_bytes": plan.kv_token_bytes, "kv_tokens": plan.kv_tokens}
    estimated = None if plan.refusals else pace(config, shape, **sizes, card=find_card(card_name)[0])
    if estimated:
        write(
            f"Speed, scaled from one H100, perhaps wrong by half: an engine samples {estimated.sampled_per_s:,.0f} "
            f"tokens/s, the learner trains {estimated.packed_per_s:,.0f} tokens/s; {config.num_steps} train steps take "
            f"{duration(config.num_steps * estimated.step_s)} if attempts have a third of "
            "rollout.engine.max_model_len tokens, half of them sampled, and half of the groups have signal"
        )
    for planned in plan.cards:
        table = Table(title=f"{planned.name}: {planned.num_bytes / GIB:.2f} GiB", title_justify="left")
        for title in ("process", "part", "GiB"):
            table.add_column(title, justify="right" if title == "GiB" else "left")
        for process in planned.processes:
            for name, num_bytes in process.parts.items():
                table.add_row(process.name, name, f"{num_bytes / GIB:.2f}")
            table.add_row(process.name, "total", f"{process.num_bytes / GIB:.2f}", end_section=True)
        table.add_row("", "free" if planned.free >= 0 else "missing", f"{abs(planned.free) / GIB:.2f}", style="bold")
        console.print(table)
    return int(bool(plan.refusals))
