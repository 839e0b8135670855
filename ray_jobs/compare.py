"""Compare two evaluations of the same items: paired, with a test, intervals, and the items a claim would need."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from configs.errors import UserError, printable
from ray_jobs.evaluation import (
    IDENTITY,
    StoredEvaluation,
    fact_rows,
    phases_of_run,
    read_evaluation,
    title_of,
    why_unscored,
)
from ray_jobs.run.folder import write_json
from ray_jobs.statistics import compare_means, compare_paired, items_needed, wilson_interval
from ray_jobs.viewer.pages import Rate, answered, percent, points, write_page

ASKED_GAINS = (0.02, 0.05, 0.1)
"""Differences whose number of items is always reported."""

Comparison = dict[str, Any]
"""JSON values of `comparison.json`."""


def run_compare(before: Path, after: Path | None, *, out: Path | None, anyway: bool) -> Path:
    """Print and write a comparison, and return its page.

    Without `after`, `before` is the folder of a training run, whose phases before and after RL are compared. Raises
    UserError for evaluations that differ in more than their policy, unless `anyway`.
    """
    one, two = phases_of_run(before) if after is None else map(read_evaluation, (before, after))
    result = comparison(one, two)
    if result["differs_in"] and not anyway:
        raise UserError(
            f"'{one.path}' and '{two.path}' differ in {', '.join(result['differs_in'])}, and not only in the policy; "
            "evaluate both with the same settings, or compare the common items with --anyway"
        )
    folder = out or (before / "comparison" if after is None else after / f"against-{before.resolve().name}")
    if (folder / IDENTITY).exists() or (folder / "config.json").exists():
        raise UserError(f"'{folder}' holds an evaluation or a run, and its report; name another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", result)
    page = write_comparison_page(folder, (one, two), result)
    console = Console()
    console.print(_table(result))
    console.print(result["verdict"])
    console.print(f"report: {page}", markup=False, soft_wrap=True)
    return page


def comparison(before: StoredEvaluation, after: StoredEvaluation) -> Comparison:
    """Compare two evaluations. Raises UserError if they share no scored item, or if an item differs."""
    asked, again = ({item.place: (item.question, item.gold) for item in side.items} for side in (before, after))
    places = sorted(before.solved.keys() & after.solved.keys())
    if not places:
        raise UserError("the two evaluations have no scored item in common; evaluate both on the same benchmarks")
    if changed := [place for place in places if asked[place] != again[place]]:
        raise UserError(
            f"{len(changed)} items have the same id and another question or reference, first {'/'.join(changed[0])}; "
            "evaluate both on the same files"
        )
    left_out = sorted((asked.keys() & again.keys()) - set(places))
    items = [*before.items, *after.items]
    one_seed = {item.seed for item in items} == {0}

    def compared(dataset: str | None) -> dict[str, Any]:
        pairs = before.paired_with(after, dataset=dataset)
        found = (compare_paired if one_seed else compare_means)(*zip(*pairs, strict=True))
        return asdict(found) | {
            "gain": found.gain,
            "verdict": found.verdict,
            "items_for_this_gain": items_needed(found.gain, found.discordant),
            "items_for": {f"{gain:g}": items_needed(gain, found.discordant) for gain in ASKED_GAINS},
        }

    whole = compared(None)
    return {
        "before": before.name,
        "after": after.name,
        "differs_in": before.identity.differences(after.identity),
        "left_out": ["/".join(place) for place in left_out],
        "left_out_because": why_unscored(item for item in items if item.place in left_out),
        "one_seed": one_seed,
        "all": whole,
        "benchmarks": {name: compared(name) for name in sorted({dataset for dataset, _ in places})},
        "verdict": whole["verdict"],
    }


def _table(result: Comparison) -> Table:
    title = escape(printable(f"{result['before']} -> {result['after']}"))
    columns = ("benchmark", "items", "before", "after", "gain", "95% interval", "p", "items for this gain")
    table = Table(*columns, title=title, title_justify="left")
    rows = result["benchmarks"] | ({"all": result["all"]} if len(result["benchmarks"]) > 1 else {})
    for name, row in rows.items():
        rates = percent(row["before"]), percent(row["after"]), points([row["gain"]], signed=True)
        needed = str(row["items_for_this_gain"] or "")
        interval = points(row["ci95"], signed=True)
        table.add_row(Text(printable(name)), str(row["num_tasks"]), *rates, interval, f"{row['p']:.3g}", needed)
    return table


def write_comparison_page(folder: Path, sides: tuple[StoredEvaluation, StoredEvaluation], result: Comparison) -> Path:
    """Write `report.html` into a folder. Raises OSError."""
    whole = result["all"]
    answer, kind = answered(whole["gain"], whole["p"])
    if result["differs_in"]:
        answer, kind = f"This cannot be decided: they also differ in {', '.join(result['differs_in'])}.", "unsure"
    bars = []
    for name, row in result["benchmarks"].items():
        count = row["num_tasks"]
        for side in ("before", "after"):
            interval = wilson_interval(row[side] * count, count)
            note = f"{side}, {count} items"
            bars.append(Rate(label=title_of(name), note=note, rate=row[side], interval=interval, kind=side))
    return write_page(
        folder / "report.html",
        "comparison",
        answer=answer,
        kind=kind,
        result=result,
        bars=bars,
        rows={**result["benchmarks"], "all": whole},
        gains=[f"for {100 * float(gain):g} points" for gain in whole["items_for"]],
        one_run=sides[0].path == sides[1].path,
        facts=list(fact_rows(*(side.identity for side in sides))),
        provenance=sides[1].identity.provenance,
        title_of=title_of,
    )
