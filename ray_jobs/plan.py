"""`agentflow plan`: what a run needs on which card, with the arithmetic, before anything is started or downloaded."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.run import RunConfig
from ray_jobs.plan_memory import GIB
from ray_jobs.plan_refusals import Refusal, refusals
from ray_jobs.plan_run import Card, RunPlan, card_bytes, find_shapes, plan_run


def make_plan(
    config: RunConfig, *, card: str, model_config: Path | None = None, machine_bytes: int | None = None
) -> tuple[RunPlan, list[Refusal]]:
    """The plan, and why it does not fit (empty where it does). `machine_bytes` None is this machine's memory. Raises
    PlanError."""
    # A recipe without a card must not let a mistyped one pass.
    card_bytes(card)
    shapes = find_shapes(config, model_config)
    memory = machine_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def replan(changed: RunConfig) -> RunPlan:
        return plan_run(changed, shapes, card=card, machine_bytes=memory)

    plan = replan(config)
    return plan, refusals(config, plan, replan, card=card)


def run_plan(config: RunConfig, *, card: str, model_config: Path | None, as_json: bool) -> int:
    """Print the plan; returns 1 where the run does not fit."""
    plan, refused = make_plan(config, card=card, model_config=model_config)
    if as_json:
        print(json.dumps(plan_facts(plan, refused), indent=2))
    else:
        _show(plan, refused)
    return int(bool(refused))


def plan_facts(plan: RunPlan, refused: Sequence[Refusal]) -> dict[str, Any]:
    """The plan as JSON holds it."""
    return asdict(plan) | {
        "kv_sequences": plan.kv.num_sequences(plan.max_model_len),
        "process_bytes": {process.name: process.num_bytes for process in plan.processes},
        "fits": not refused,
        "refusals": [{"reason": one.reason, "remedies": list(map(dict, one.remedies))} for one in refused],
    }


def _show(plan: RunPlan, refused: Sequence[Refusal]) -> None:
    console = Console()
    shape = plan.policy
    if not refused:
        console.print(f"It fits: {'; '.join(map(_room, plan.cards))}.", highlight=False)
    for one in refused:
        console.print(f"It does not fit: {one.reason}.", highlight=False)
        for changes in one.remedies:
            console.print(f"  set {as_overrides(changes)}", highlight=False)
    console.print(
        f"{shape.name}: {shape.num_parameters:,} parameters in {shape.num_layers} layers; KV cache: "
        f"{plan.kv_arithmetic}; {plan.kv.num_sequences(plan.max_model_len)} sequences of {plan.max_model_len:,} tokens "
        "at a time",
        highlight=False,
    )
    for card in plan.cards:
        console.print(_table(card))


def _room(card: Card) -> str:
    *others, last = (process.name for process in card.processes)
    names, verb = (f"{', '.join(others)} and {last}", "take") if others else (last, "takes")
    used, all_of_it = (card.num_bytes - card.free) / GIB, card.num_bytes / GIB
    return f"{names} {verb} {used:.1f} of the {all_of_it:.1f} GiB of {card.name}"


def as_overrides(changes: Mapping[str, Any]) -> str:
    """As the command line takes them."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in changes.items())


def _table(card: Card) -> Table:
    table = Table(title=f"{card.name}: {card.num_bytes / GIB:.2f} GiB", title_justify="left")
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
