"""`agentflow plan`: the memory that a run needs, on which card, and whether it fits."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.base import fastest_precision
from configs.cluster import BASE_SHARE, RANK_SHARE
from configs.errors import did_you_mean
from configs.learner import LOGIT_CHUNK_TOKENS
from configs.run import RunConfig
from ray_jobs.run import model_memory as memory
from ray_jobs.run.model_memory import GIB, KvCache, ModelShape, Part, PlanError, find_shape
from ray_jobs.run.origin import memory_bytes
from rollout.engines.vllm_parts import MAX_LORAS, batched_tokens, kv_block, kv_cache_bytes

CARDS = {
    "A40": 44.3,
    "L40S": 44.3,
    "A6000": 47.4,
    "A100-40": 39.4,
    "A100": 79.1,
    "H100": 79.1,
    "H200": 139.8,
    "L4": 21.9,
}
"""The GiB that CUDA reports, which are fewer than the name says."""
USUAL_CARD = "A40"
HEADROOM = int(0.5 * GIB)
"""Memory that must remain free, because the formulas are approximate."""
SETTINGS = {
    "engine": "rollout.engine.kv_cache_gib or rollout.engine.max_model_len",
    "learner": "learner.gradient_checkpointing=true or learner.microbatch_tokens",
    "PRM": "prm.gradient_checkpointing=true or prm.microbatch_tokens",
    "base weights": "model.path",
}
"""The one or two settings that decide most of each process's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of the run and its memory."""

    name: str
    device: str
    parts: tuple[Part, ...]
    share: float | None
    """The share of a card that it claims; None on a CPU."""

    @property
    def num_bytes(self) -> int:
        """Return the sum of its parts."""
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    kv: KvCache
    max_model_len: int
    cards: tuple[Card, ...]
    refusals: tuple[str, ...]
    """The reasons why the run does not fit, each with the settings to change; empty if it fits."""

    @property
    def processes(self) -> tuple[Process, ...]:
        """Return the processes of all cards."""
        return tuple(process for card in self.cards for process in card.processes)


def card_bytes(card: str) -> int:
    """Return the bytes of a card, which is a name or a number of GiB."""
    by_name = {name.lower(): gib for name, gib in CARDS.items()}
    try:
        gib = by_name.get(card.lower()) or float(card)
    except ValueError:
        raise PlanError(
            f"--card '{card}' is neither a number of GiB nor one of {', '.join(CARDS)}"
            f"{did_you_mean(card.upper(), CARDS)}"
        ) from None
    if not 0 < gib < 10_000:
        raise PlanError(f"--card {card}: a card has between 0 and 10,000 GiB")
    return int(gib * GIB)


def make_plan(
    config: RunConfig, *, card: str, model_config: Path | None = None, machine_bytes: int | None = None
) -> RunPlan:
    """Compute the memory of a run.

    With card.shared, learner, PRM and one engine are on one card, and each further engine on another. Otherwise each
    process is limited to its share of a card, because Ray may place others on the same one.

    Args:
        config: The run.
        card: The name or the GiB of the card for processes on `cuda`.
        model_config: The policy's config.json instead of that of model.path.
        machine_bytes: The memory for processes on a CPU; None is this machine's.
    """
    card_bytes(card)  # also a recipe without a card rejects a mistyped one
    trained = config.reward.prm_path
    if trained and Path(trained, "prm.json").is_file():
        from reward.prm.model import prm_in_use

        config = config.model_copy(update={"prm": prm_in_use(config)})
    shape = find_shape(config.model.path, model_config)
    prm_shape = find_shape(config.prm.model_path).cut(config.prm.num_layers) if config.reward.prm is not None else None
    engines = config.rollout.engine
    spread = engines.tensor_parallel
    shape.check_cards(spread)
    learner = _learner(config, shape)
    once = [_engine(config, shape, reads_base=config.shares_base), learner]
    if config.shares_base:
        once.insert(0, _base(config, shape))
    if prm_shape is not None:
        once.append(_prm(config, prm_shape))
    further = [_engine(config, shape, reads_base=False)] * (config.rollout.num_workers - 1)
    on_cpu = [process for process in once + further if process.device == "cpu"]
    on_card = [process for process in once if process.device == "cuda"]
    name, cards = f"a card of {card} GiB" if card[0].isdigit() else card.upper(), []
    if on_card and config.shares_card:
        cards.append(Card(name=name, num_bytes=card_bytes(card), processes=tuple(on_card)))
        on_card = [process for process in further[:1] if process.device == "cuda"]
    for process in on_card:
        share = process.share or 1.0
        cards.append(Card(name=f"{share:g} of {name}", num_bytes=int(share * card_bytes(card)), processes=(process,)))
    if on_cpu:
        cards.append(Card(name="this machine", num_bytes=machine_bytes or memory_bytes(), processes=tuple(on_cpu)))
    kv = memory.kv_cache(shape, engines.precision, kv_cache_bytes(engines), kv_block(engines.device), spread)
    refusals = (*_length_refusals(config, shape, kv), *map(partial(_memory_refusal, config), cards))
    return RunPlan(
        policy=shape,
        kv=kv,
        max_model_len=engines.max_model_len,
        cards=tuple(cards),
        refusals=tuple(filter(None, refusals)),
    )


def _length_refusals(config: RunConfig, shape: ModelShape, kv: KvCache) -> Iterator[str]:
    length = config.rollout.engine.max_model_len
    if length > shape.max_positions:
        yield (
            f"rollout.engine.max_model_len = {length} is longer than the {shape.max_positions} positions of "
            f"{shape.name}; set it to at most that"
        )
    if kv.num_sequences(length) == 0:
        yield (
            f"rollout.engine.kv_cache_gib = {config.rollout.engine.kv_cache_gib:g} holds {kv.num_tokens:,} tokens, "
            f"less than one sequence of rollout.engine.max_model_len = {length:,}; raise the first or lower the second"
        )


def _memory_refusal(config: RunConfig, card: Card) -> str | None:
    if card.free >= HEADROOM:
        return None
    needs = ", ".join(f"{process.name} {process.num_bytes / GIB:.2f}" for process in card.processes)
    largest = max(card.processes, key=lambda process: process.num_bytes)
    settings = SETTINGS[largest.name]
    if largest.share is not None and not config.card.shared and largest.name != "base weights":
        settings += f", or raise card.{largest.name.lower()}"
    return (
        f"{card.name} has {card.num_bytes / GIB:.2f} GiB and needs {(HEADROOM - card.free) / GIB:.2f} more ({needs}, "
        f"{HEADROOM / GIB:g} of head-room); for the {largest.name} change {settings}, or use a larger card"
    )


def _base(config: RunConfig, shape: ModelShape) -> Process:
    """Compute the holder of the base weights that learner and first engine read."""
    device = config.learner.device
    parts = (memory.weights(shape, config.learner.precision), _process_part("base weights", device))
    return Process(name="base weights", device=device, parts=parts, share=BASE_SHARE if device == "cuda" else None)


def _engine(config: RunConfig, shape: ModelShape, *, reads_base: bool) -> Process:
    """Compute vLLM: base weights, adapter slots, KV cache, a step's working memory, CUDA graphs.

    Of an engine over several cards, which has them alone, this is one card. On a CPU it always packs its own copy of
    the base weights.
    """
    engine, rank = config.rollout.engine, config.model.lora_rank
    cards, on_card = engine.tensor_parallel, engine.device == "cuda"
    cache = memory.kv_cache(shape, engine.precision, kv_cache_bytes(engine), kv_block(engine.device), cards)
    parts = [] if reads_base and on_card else [memory.weights(shape, engine.precision, cards)]
    if engine.adapter_mode == "native":
        num_lora = shape.lora_parameters(rank, config.model.lora_targets)
        parts.append(memory.engine_adapters(num_lora, MAX_LORAS, engine.precision, cards))
    parts.append(
        Part(
            name="KV cache",
            num_bytes=kv_cache_bytes(engine),
            arithmetic=f"{cache.token_bytes / 1024:g} KiB x {cache.num_tokens:,} tokens: "
            f"{cache.num_sequences(engine.max_model_len)} sequences of {engine.max_model_len:,}",
        )
    )
    tokens, rows = batched_tokens(engine), engine.max_num_seqs
    parts.append(memory.engine_working(shape, engine.precision, tokens, rows, rank, device=engine.device))
    if on_card:
        parts.append(Part(name="CUDA graphs", num_bytes=memory.CUDA_GRAPHS, arithmetic="allowance"))
    parts.append(_process_part("engine", engine.device))
    share = (config.card.engine if cards == 1 else 1.0) if on_card else None
    return Process(name="engine", device=engine.device, parts=tuple(parts), share=share)


def _learner(config: RunConfig, shape: ModelShape) -> Process:
    """Compute the learner: base weights unless shared, the adapter's training, one microbatch.

    A trajectory longer than a microbatch is trained alone, so the longest one counts too. Of several ranks this is
    one; they divide the optimizer's moments. At `zero_stage` 3 they also divide the base weights, but only after each
    has loaded all of them.
    """
    learner, model = config.learner, config.model
    ranks = learner.num_workers
    acting = memory.activations(
        shape,
        max(learner.microbatch_tokens, config.rollout.engine.max_model_len),
        rank=model.lora_rank,
        checkpointing=learner.gradient_checkpointing,
        chunk=LOGIT_CHUNK_TOKENS,
        device=learner.device,
    )
    num_lora = shape.lora_parameters(model.lora_rank, model.lora_targets)
    parts = (
        *([] if config.shares_base else [memory.weights(shape, learner.precision)]),
        memory.adapter_training(num_lora, ranks),
        *([memory.adapter_copy("gradient bucket", num_lora)] if ranks > 1 else []),
        *([memory.adapter_copy("reference adapter", num_lora)] if learner.has_reference else []),
        *_with_fragments(acting),
        _process_part("learner", learner.device),
    )
    share = config.card.learner - BASE_SHARE * config.shares_base if ranks == 1 else RANK_SHARE
    on_card = learner.device == "cuda"
    return Process(name="learner", device=learner.device, parts=parts, share=share if on_card else None)


def _prm(config: RunConfig, shape: ModelShape) -> Process:
    """Compute the PRM: trained in the run, or only scoring if the recipe names a trained one."""
    prm = config.prm
    num_lora = shape.lora_parameters(prm.lora_rank, tuple(shape.linears))
    tokens = max(prm.microbatch_tokens, prm.max_tokens)
    if config.reward.prm_path:
        adapter = memory.adapter_copy("adapter", num_lora)
        acting = memory.scoring(shape, tokens)
    else:
        adapter = memory.adapter_training(num_lora)
        checkpointing = prm.gradient_checkpointing
        acting = memory.activations(
            shape, tokens, rank=prm.lora_rank, checkpointing=checkpointing, chunk=0, device=prm.device
        )
    base = memory.weights(shape, fastest_precision(prm.device))
    parts = (base, adapter, *_with_fragments(acting), _process_part("prm", prm.device))
    return Process(name="PRM", device=prm.device, parts=parts, share=config.card.prm if prm.device == "cuda" else None)


def _with_fragments(acting: Part) -> tuple[Part, Part]:
    text = f"{memory.FRAGMENTS:.0%} of the activations, held by the caching allocator"
    return acting, Part(name="allocator", num_bytes=int(acting.num_bytes * memory.FRAGMENTS), arithmetic=text)


def _process_part(name: str, device: str) -> Part:
    if device == "cuda":
        return Part(name="CUDA context", num_bytes=memory.CUDA_CONTEXT, arithmetic="allowance")
    return Part(name="libraries", num_bytes=memory.CPU_PROCESS[name], arithmetic="allowance")


def run_plan(config: RunConfig, *, card: str | None, model_config: Path | None, as_json: bool) -> int:
    """Print the plan. Return 1 if the run does not fit."""
    plan = make_plan(config, card=card or USUAL_CARD, model_config=model_config)
    if card is not None and all(process.device == "cpu" for process in plan.processes):
        raise PlanError(
            f"--card {card}: this recipe uses no card; leave it out, or set rollout.engine.device and learner.device "
            "to 'cuda'"
        )
    if as_json:
        print(json.dumps(plan_facts(plan), indent=2))
    else:
        _show(plan)
    return int(bool(plan.refusals))


def plan_facts(plan: RunPlan) -> dict[str, object]:
    """Return the plan as JSON values."""
    return asdict(plan) | {
        "kv_sequences": plan.kv.num_sequences(plan.max_model_len),
        "process_bytes": {process.name: process.num_bytes for process in plan.processes},
        "fits": not plan.refusals,
    }


def _show(plan: RunPlan) -> None:
    console = Console()
    # Paths may hold square brackets, and settings to copy must stay on one line.
    write = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    for refusal in plan.refusals:
        write(f"It does not fit: {refusal}.")
    if not plan.refusals:
        used = (
            f"{' + '.join(process.name for process in card.processes)} {(card.num_bytes - card.free) / GIB:.1f} of the "
            f"{card.num_bytes / GIB:.1f} GiB of {card.name}"
            for card in plan.cards
        )
        write(f"It fits: {'; '.join(used)}.")
    shape = plan.policy
    write(
        f"{shape.name}: {shape.num_parameters:,} parameters in {shape.num_layers} layers; KV cache: "
        f"{plan.kv.token_bytes / 1024:g} KiB per token, {plan.kv.num_sequences(plan.max_model_len)} sequences of "
        f"{plan.max_model_len:,} tokens at a time"
    )
    for card in plan.cards:
        table = Table(title=escape(f"{card.name}: {card.num_bytes / GIB:.2f} GiB"), title_justify="left")
        table.add_column("process")
        table.add_column("part")
        table.add_column("GiB", justify="right")
        table.add_column("arithmetic")
        for process in card.processes:
            for part in process.parts:
                table.add_row(process.name, part.name, f"{part.num_bytes / GIB:.2f}", part.arithmetic)
            claims = f"claims {process.share:g} of a card; " if process.share is not None else ""
            total = f"{process.num_bytes / GIB:.2f}"
            change = f"{claims}change {SETTINGS[process.name]}"
            table.add_row(process.name, "total", total, change, end_section=True, style="bold")
        table.add_row("", "free" if card.free >= 0 else "missing", f"{abs(card.free) / GIB:.2f}", "", style="bold")
        console.print(table)
