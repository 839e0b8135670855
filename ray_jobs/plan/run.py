"""What the processes of a run need, on which card they stand, and whether it fits."""

from dataclasses import dataclass
from pathlib import Path

from configs.base import fastest_precision
from configs.cluster import BASE_SHARE, RANK_SHARE
from configs.errors import did_you_mean
from configs.run import RunConfig
from ray_jobs.plan import memory
from ray_jobs.plan.memory import GIB, KvCache, Part
from ray_jobs.plan.shapes import ModelShape, PlanError, find_shape
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
"""GiB that CUDA reports, which is less than the name says."""
HEADROOM = int(0.5 * GIB)
"""What must be left over: figures are figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of the run. `share` is what it claims of a card, None on a CPU."""

    name: str
    device: str
    parts: tuple[Part, ...]
    share: float | None

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card, or the memory of a machine, and who stands on it."""

    name: str
    num_bytes: int
    processes: tuple[Process, ...]

    @property
    def free(self) -> int:
        """Negative where it does not fit."""
        return self.num_bytes - sum(process.num_bytes for process in self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything that `agentflow plan` says, but for what to change."""

    policy: ModelShape
    kv: KvCache
    kv_arithmetic: str
    max_model_len: int
    cards: tuple[Card, ...]

    @property
    def processes(self) -> tuple[Process, ...]:
        return tuple(process for card in self.cards for process in card.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Of the policy and of the PRM's base, which is None for a run without a PRM."""

    policy: ModelShape
    prm: ModelShape | None


def find_shapes(config: RunConfig, model_config: Path | None) -> Shapes:
    """`model_config` stands in for the policy's. Raises PlanError."""
    prm = None
    if config.reward.prm is not None:
        prm = find_shape(config.prm.model_path).cut(config.prm.num_layers)
    return Shapes(policy=find_shape(config.model.path, model_config), prm=prm)


def card_bytes(card: str) -> int:
    """A card by its name, or its GiB. Raises PlanError."""
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


def plan_run(config: RunConfig, shapes: Shapes, *, card: str, machine_bytes: int) -> RunPlan:
    """`card` is what CUDA processes stand on, `machine_bytes` the memory for those on a CPU.

    Sharing: learner, PRM and one engine are on one card, every further engine on another. Not sharing: each process is
    held to its share of a card, for Ray may put others beside it. Raises PlanError.
    """
    shapes.policy.check_cards(config.rollout.engine.tensor_parallel)
    engine, learner, prm = engine_process(config, shapes), learner_process(config, shapes), prm_process(config, shapes)
    base = base_process(config, shapes)
    once = [process for process in (base, engine, learner, prm) if process is not None]
    further = [engine_process(config, shapes, own_base=True)] * (config.rollout.num_workers - 1)
    on_cpu = [process for process in once + further if process.device == "cpu"]
    on_card = [process for process in once if process.device == "cuda"]
    cards = []
    if on_card and config.shares_card:
        cards.append(Card(name=_card_name(card), num_bytes=card_bytes(card), processes=tuple(on_card)))
        on_card = [process for process in further[:1] if process.device == "cuda"]
    cards += [_share_of_card(process, card) for process in on_card]
    if on_cpu:
        cards.append(Card(name="this machine", num_bytes=machine_bytes, processes=tuple(on_cpu)))
    engines = config.rollout.engine
    spread = engines.tensor_parallel
    return RunPlan(
        policy=shapes.policy,
        kv=memory.kv_cache(shapes.policy, engines.precision, kv_cache_bytes(engines), kv_block(engines.device), spread),
        kv_arithmetic=memory.kv_arithmetic(shapes.policy, engines.precision, spread),
        max_model_len=engines.max_model_len,
        cards=tuple(cards),
    )


def _share_of_card(process: Process, card: str) -> Card:
    share = process.share or 1.0
    return Card(name=f"{share:g} of {_card_name(card)}", num_bytes=int(share * card_bytes(card)), processes=(process,))


def _card_name(card: str) -> str:
    return f"a card of {card} GiB" if card[0].isdigit() else card.upper()


def base_process(config: RunConfig, shapes: Shapes) -> Process | None:
    """The holder of the base weights that learner and first engine read; None where each has its own."""
    if not config.shares_base:
        return None
    device = config.learner.device
    parts = (memory.weights(shapes.policy, config.learner.precision), _process_part("base weights", device))
    return Process(name="base weights", device=device, parts=parts, share=BASE_SHARE if device == "cuda" else None)


def engine_process(config: RunConfig, shapes: Shapes, *, own_base: bool = False) -> Process:
    """vLLM: one copy of the base, places for adapters, the cache, what a step needs, graphs. An engine over several
    cards has them for itself; this is one of them. The first may read a base that another process holds; on a CPU it
    packs a copy of its own."""
    engine, shape, rank = config.rollout.engine, shapes.policy, config.model.lora_rank
    cards = engine.tensor_parallel
    on_card = engine.device == "cuda"
    cache = memory.kv_cache(shape, engine.precision, kv_cache_bytes(engine), kv_block(engine.device), cards)
    reads = config.shares_base and on_card and not own_base
    parts = [] if reads else [memory.weights(shape, engine.precision, cards)]
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


def learner_process(config: RunConfig, shapes: Shapes) -> Process:
    """One copy of the base unless it is shared, the adapter's training, one microbatch. A trajectory that is longer
    than a microbatch goes alone, so the longest one counts as well. Of several ranks this is one: they divide the
    optimizer's moments. At `zero_stage` 3 they divide the base as well, but only once each has loaded all of it."""
    learner, model, shape = config.learner, config.model, shapes.policy
    ranks = learner.num_workers
    acting = memory.activations(
        shape,
        max(learner.microbatch_tokens, config.rollout.engine.max_model_len),
        rank=model.lora_rank,
        checkpointing=learner.gradient_checkpointing,
        chunk=learner.logit_chunk_tokens,
        device=learner.device,
    )
    num_lora = shape.lora_parameters(model.lora_rank, model.lora_targets)
    parts = (
        *([] if config.shares_base else [memory.weights(shape, learner.precision)]),
        memory.adapter_training(num_lora, ranks),
        *([memory.adapter_copy("gradient bucket", num_lora)] if ranks > 1 else []),
        *([memory.adapter_copy("reference adapter", num_lora)] if learner.has_reference else []),
        acting,
        memory.fragments(acting),
        _process_part("learner", learner.device),
    )
    share = config.card.learner - BASE_SHARE * config.shares_base if ranks == 1 else RANK_SHARE
    on_card = learner.device == "cuda"
    return Process(name="learner", device=learner.device, parts=parts, share=share if on_card else None)


def prm_process(config: RunConfig, shapes: Shapes) -> Process | None:
    """The PRM: trained in the run unless the recipe names a trained one, which then only scores."""
    prm, shape = config.prm, shapes.prm
    if shape is None:
        return None
    num_lora = shape.lora_parameters(prm.lora_rank, tuple(shape.linears))
    tokens = max(prm.microbatch_tokens, prm.max_tokens)
    if config.reward.prm_path:
        adapter = memory.adapter_copy("adapter", num_lora)
        acting = memory.scoring(shape, tokens)
    else:
        adapter = memory.adapter_training(num_lora)
        acting = memory.activations(
            shape,
            tokens,
            rank=prm.lora_rank,
            checkpointing=prm.gradient_checkpointing,
            chunk=0,
            device=prm.device,
        )
    parts = (
        memory.weights(shape, fastest_precision(prm.device)),
        adapter,
        acting,
        memory.fragments(acting),
        _process_part("prm", prm.device),
    )
    return Process(name="PRM", device=prm.device, parts=parts, share=config.card.prm if prm.device == "cuda" else None)


def _process_part(name: str, device: str) -> Part:
    if device == "cuda":
        return Part(name="CUDA context", num_bytes=memory.CUDA_CONTEXT, arithmetic="allowance")
    return Part(name="libraries", num_bytes=memory.CPU_PROCESS[name], arithmetic="allowance")
