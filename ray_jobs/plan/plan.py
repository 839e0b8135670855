"""`agentflow plan`: what a run needs on which card, why it does not fit, and which setting would make it fit."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.loading import value_of, with_changes
from configs.run import RunConfig
from ray_jobs.plan.memory import GIB, WEIGHTS
from ray_jobs.plan.run import HEADROOM, Card, RunPlan, card_bytes, find_shapes, plan_run
from ray_jobs.plan.shapes import PlanError
from ray_jobs.run.provenance import memory_bytes
from rollout.engines.vllm_parts import kv_block

Replan = Callable[[RunConfig], RunPlan]
Changes = Mapping[str, object]
LENGTH_STEP = 256
USUAL_CARD = "A40"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`remedies` are overrides, each of which alone mends it; several settings in one mean that it takes all of them.
    Empty where no setting does."""

    reason: str
    remedies: tuple[Changes, ...]


def _length_refusals(config: RunConfig, plan: RunPlan) -> Iterator[Refusal]:
    length = plan.max_model_len
    if length > plan.policy.max_positions:
        yield Refusal(
            reason=f"rollout.engine.max_model_len = {length} is longer than the {plan.policy.max_positions} positions "
            f"that {plan.policy.name} knows",
            remedies=({"rollout.engine.max_model_len": plan.policy.max_positions},),
        )
    if plan.kv.num_sequences(length) == 0:
        longest: Changes = {"rollout.engine.max_model_len": plan.kv.num_tokens}
        least: Changes = {"rollout.engine.kv_cache_gib": _kv_gib(config, plan, length)}
        yield Refusal(
            reason=f"rollout.engine.kv_cache_gib = {config.rollout.engine.kv_cache_gib:g} holds {plan.kv.num_tokens:,} "
            f"tokens, which is not one sequence of rollout.engine.max_model_len = {length:,}",
            remedies=tuple(changes for changes in (least, longest) if _changed(config, changes) is not None),
        )


def _memory_refusals(config: RunConfig, plan: RunPlan, replan: Replan, card: str) -> Iterator[Refusal]:
    for place, one in enumerate(plan.cards):
        if one.free >= HEADROOM:
            continue
        needs = ", ".join(f"{process.name} {process.num_bytes / GIB:.2f}" for process in one.processes)
        reason = (
            f"{one.name} has {one.num_bytes / GIB:.2f} GiB and needs {(HEADROOM - one.free) / GIB:.2f} more: {needs}, "
            f"and {HEADROOM / GIB:g} of head-room"
        )
        remedies = tuple(_remedies(config, plan, replan, place, card))
        yield Refusal(reason=reason if remedies else reason + _no_setting(config, one), remedies=remedies)


def _no_setting(config: RunConfig, card: Card) -> str:
    weights = sum(part.num_bytes for one in card.processes for part in one.parts if part.name == WEIGHTS) / GIB
    needed = math.ceil((card.num_bytes - card.free + HEADROOM) / GIB)
    cards = "several cards with card.shared=false, " if config.card.shared else ""
    return (
        f"; no setting makes it fit (weights alone take {weights:.2f}): take one of {needed} GiB, {cards}or a smaller "
        "model.path"
    )


def _remedies(config: RunConfig, plan: RunPlan, replan: Replan, place: int, card: str) -> Iterator[Changes]:
    def works(changes: Changes) -> bool:
        changed = _changed(config, changes)
        if changed is None:
            return False
        then = replan(changed)
        return then.cards[place].free >= HEADROOM and then.kv.num_sequences(then.max_model_len) > 0

    alone = _single_changes(config, plan, plan.cards[place], card)
    found = [working for choices in alone if (working := next(filter(works, choices), None))]
    yield from found or filter(None, [next(filter(works, _combined_changes(config, plan)), None)])


def _single_changes(config: RunConfig, plan: RunPlan, tight: Card, card: str) -> Iterator[Sequence[Changes]]:
    """For each setting the values to try, the mildest first."""
    names = {process.name: process for process in tight.processes}
    engine, learner = config.rollout.engine, config.learner
    if not config.card.shared and tight.processes[0].share is not None:
        share = math.ceil(100 * (tight.num_bytes - tight.free + HEADROOM) / card_bytes(card)) / 100
        yield [{f"card.{tight.processes[0].name.lower()}": share}]
    if "learner" in names and not learner.gradient_checkpointing:
        yield [{"learner.gradient_checkpointing": True}]
    if "PRM" in names and not config.prm.gradient_checkpointing and not config.reward.prm_path:
        yield [{"prm.gradient_checkpointing": True}]
    if "engine" in names:
        least = _kv_gib(config, plan, engine.max_model_len)
        steps = range(math.floor(4 * engine.kv_cache_gib), math.ceil(4 * least) - 1, -1)
        yield [{"rollout.engine.kv_cache_gib": step / 4} for step in steps]
    if "learner" in names:
        yield [{"learner.microbatch_tokens": tokens} for tokens in _shorter(learner.microbatch_tokens)]
    yield [{"rollout.engine.max_model_len": tokens} for tokens in _shorter(engine.max_model_len)]


def _combined_changes(config: RunConfig, plan: RunPlan) -> Iterator[Changes]:
    """Recomputation everywhere, a cache of one sequence, and ever shorter trajectories."""
    engine = config.rollout.engine
    recomputing = {"learner.gradient_checkpointing": True, "prm.gradient_checkpointing": True}
    for tokens in (engine.max_model_len, *_shorter(engine.max_model_len)):
        yield {name: True for name in recomputing if not value_of(config, name)} | {
            "rollout.engine.kv_cache_gib": min(engine.kv_cache_gib, _kv_gib(config, plan, tokens)),
            "rollout.engine.max_model_len": tokens,
            "learner.microbatch_tokens": min(config.learner.microbatch_tokens, tokens),
        }


def _shorter(tokens: int) -> range:
    return range((tokens - 1) // LENGTH_STEP * LENGTH_STEP, LENGTH_STEP - 1, -LENGTH_STEP)


def _kv_gib(config: RunConfig, plan: RunPlan, length: int) -> float:
    """The least cache, in quarters of a GiB, that holds one sequence of this length."""
    block = kv_block(config.rollout.engine.device)
    return math.ceil(4 * math.ceil(length / block) * block * plan.kv.token_bytes / GIB) / 4


def _changed(config: RunConfig, changes: Changes) -> RunConfig | None:
    """None where the recipe does not allow it."""
    try:
        return with_changes(config, changes)
    except ValidationError:
        return None


def make_plan(
    config: RunConfig, *, card: str, model_config: Path | None = None, machine_bytes: int | None = None
) -> tuple[RunPlan, list[Refusal]]:
    """The plan, and why it does not fit (empty where it does). `machine_bytes` None is this machine's memory. Raises
    PlanError."""
    # A recipe without a card must not let a mistyped one pass.
    card_bytes(card)
    config = _with_trained_prm(config)
    shapes = find_shapes(config, model_config)
    memory = machine_bytes or memory_bytes()

    def replan(changed: RunConfig) -> RunPlan:
        return plan_run(changed, shapes, card=card, machine_bytes=memory)

    plan = replan(config)
    return plan, [*_length_refusals(config, plan), *_memory_refusals(config, plan, replan, card)]


def _with_trained_prm(config: RunConfig) -> RunConfig:
    """With base, layers and rank of the trained PRM that the recipe names, where that is there, in the place of those
    that it would train one with."""
    trained = config.reward.prm_path
    if not trained or not Path(trained, "prm.json").is_file():
        return config
    from reward.prm.model import prm_in_use

    return config.model_copy(update={"prm": prm_in_use(config)})


def run_plan(config: RunConfig, *, card: str | None, model_config: Path | None, as_json: bool) -> int:
    """Print the plan; returns 1 where the run does not fit. Raises PlanError, also for a card that nothing runs on."""
    plan, refused = make_plan(config, card=card or USUAL_CARD, model_config=model_config)
    if card is not None and all(process.device == "cpu" for process in plan.processes):
        raise PlanError(
            f"--card {card}: nothing of this recipe runs on a card; leave it out, or set rollout.engine.device and "
            "learner.device to 'cuda'"
        )
    if as_json:
        print(json.dumps(plan_facts(plan, refused), indent=2))
    else:
        _show(plan, refused)
    return int(bool(refused))


def plan_facts(plan: RunPlan, refused: Sequence[Refusal]) -> dict[str, object]:
    """The plan as JSON holds it."""
    return asdict(plan) | {
        "kv_sequences": plan.kv.num_sequences(plan.max_model_len),
        "process_bytes": {process.name: process.num_bytes for process in plan.processes},
        "fits": not refused,
        "refusals": [{"reason": one.reason, "remedies": list(map(dict, one.remedies))} for one in refused],
    }


def _show(plan: RunPlan, refused: Sequence[Refusal]) -> None:
    console = Console()
    # Paths may hold square brackets, and what is to be pasted stays in one line.
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    shape = plan.policy
    if not refused:
        say(f"It fits: {'; '.join(map(_room, plan.cards))}.")
    for one in refused:
        say(f"It does not fit: {one.reason}.")
        for changes in one.remedies:
            say(f"  set {as_overrides(changes)}")
    say(
        f"{shape.name}: {shape.num_parameters:,} parameters in {shape.num_layers} layers; KV cache: "
        f"{plan.kv_arithmetic}; {plan.kv.num_sequences(plan.max_model_len)} sequences of {plan.max_model_len:,} tokens "
        "at a time",
    )
    for card in plan.cards:
        console.print(_table(card))


def _room(card: Card) -> str:
    *others, last = (process.name for process in card.processes)
    names, verb = (f"{', '.join(others)} and {last}", "take") if others else (last, "takes")
    used, all_of_it = (card.num_bytes - card.free) / GIB, card.num_bytes / GIB
    return f"{names} {verb} {used:.1f} of the {all_of_it:.1f} GiB of {card.name}"


def as_overrides(changes: Mapping[str, object]) -> str:
    """As the command line takes them."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in changes.items())


def _table(card: Card) -> Table:
    table = Table(title=escape(f"{card.name}: {card.num_bytes / GIB:.2f} GiB"), title_justify="left")
    table.add_column("process")
    table.add_column("what")
    table.add_column("GiB", justify="right")
    table.add_column("how")
    for process in card.processes:
        for part in process.parts:
            table.add_row(process.name, part.name, f"{part.num_bytes / GIB:.2f}", part.arithmetic)
        claims = f"claims {process.share:g} of a card" if process.share is not None else ""
        table.add_row(
            process.name, "together", f"{process.num_bytes / GIB:.2f}", claims, end_section=True, style="bold"
        )
    table.add_row("", "head-room" if card.free >= 0 else "missing", f"{abs(card.free) / GIB:.2f}", "", style="bold")
    return table
