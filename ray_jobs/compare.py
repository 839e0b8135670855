"""Compare two evaluations of the same items: paired, with a test, intervals, and the items a claim would need."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from configs.errors import visible
from envs.datasets.benchmarks import BENCHMARKS
from ray_jobs.evaluation_folder import (
    IDENTITY,
    EvaluationError,
    Place,
    StoredEvaluation,
    check_no_run,
    means_by_item,
    phases_of_run,
    read_evaluation,
    why_unscored,
)
from ray_jobs.evaluation_identity import differences, fact_rows, unproven
from ray_jobs.run.folder import write_json
from ray_jobs.statistics import PairedComparison, compare_means, compare_paired, items_needed, wilson_interval
from ray_jobs.viewer.pages import Rate, percent, points, write_page

ASKED_GAINS = (0.02, 0.05, 0.1)
"""Differences whose number of items is always reported."""


class ComparedRates(TypedDict):
    """Solve rates of two policies on paired items."""

    num_items: int
    before: float
    after: float
    gain: float
    only_before: int
    only_after: int
    gain_ci95: tuple[float, float]
    test: str
    p: float
    discordant: float
    """Mean squared difference: for one seed, the share of items that exactly one side solves."""
    items_for_this_gain: int | None
    items_for: dict[str, int | None]
    """Paired items that a true gain of each size would need."""


class Comparison(TypedDict):
    """JSON values of `comparison.json`. Lists of two values belong to the two sides."""

    before: str
    after: str
    differs_in: list[str]
    unproven: list[str]
    infrastructure_failures: list[int]
    undecided: list[int]
    left_out: list[str]
    """Items of both sides of which one is unscored."""
    left_out_because: str
    num_seeds: list[int]
    all: ComparedRates
    benchmarks: dict[str, ComparedRates]
    verdict: str


Pairs = Mapping[Place, tuple[float, float]]
"""Results of both sides on the same items: means over seeds."""


def run_compare(before: Path, after: Path | None, *, out: Path | None, anyway: bool) -> Path:
    """Print and write a comparison, and return its page.

    Without `after`, `before` is the folder of a training run, whose phases before and after RL are compared. Raises
    EvaluationError for evaluations that differ in more than their policy, unless `anyway`.
    """
    sides = phases_of_run(before) if after is None else (read_evaluation(before), read_evaluation(after))
    differing = differences(sides[0].identity, sides[1].identity)
    if differing and not anyway:
        raise EvaluationError(
            f"'{sides[0].path}' and '{sides[1].path}' differ in {', '.join(differing)}, and not only in the policy; "
            "evaluate both with the same settings, or compare the common items with --anyway"
        )
    result = comparison(*sides, differing=differing)
    folder = out or (before / "comparison" if after is None else after / f"against-{before.resolve().name}")
    check_no_run(folder)
    if (folder / IDENTITY).exists():
        raise EvaluationError(f"'{folder}' holds an evaluation and its report; name another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", result)
    page = write_comparison_page(folder, sides, result)
    console = Console()
    console.print(_table(result))
    console.print(result["verdict"])
    console.print(f"report: {page}", markup=False, soft_wrap=True)
    return page


def comparison(before: StoredEvaluation, after: StoredEvaluation, *, differing: list[str] | None = None) -> Comparison:
    """Compare two evaluations. Raises EvaluationError if they share no scored item, or if an item differs."""
    pairs, left_out = _paired(before, after)
    sides = (before, after)
    seeds = {side.identity["seeds"] for side in sides}
    compare = compare_paired if seeds == {1} else compare_means

    def compared(pairs: Pairs) -> PairedComparison:
        return compare([first for first, _ in pairs.values()], [second for _, second in pairs.values()])

    benchmarks = sorted({benchmark for benchmark, _ in pairs})
    parts = {name: {place: pairs[place] for place in pairs if place[0] == name} for name in benchmarks}
    verdict = compared(pairs).verdict
    return {
        "before": before.name,
        "after": after.name,
        "differs_in": differing or [],
        "unproven": sorted({*unproven(before.identity), *unproven(after.identity)}),
        "infrastructure_failures": [sum(item.broken for item in side.items) for side in sides],
        "undecided": [sum(item.undecided for item in side.items) for side in sides],
        "left_out": ["/".join(place) for place in left_out],
        "left_out_because": why_unscored(item for side in sides for item in side.items if item.key.place in left_out),
        "num_seeds": sorted(seeds),
        "all": _row(pairs, compared(pairs)),
        "benchmarks": {name: _row(part, compared(part)) for name, part in parts.items()},
        "verdict": verdict[0].upper() + verdict[1:],
    }


def _paired(before: StoredEvaluation, after: StoredEvaluation) -> tuple[Pairs, list[Place]]:
    # The items that both sides have scored, and those that one side has not.
    first, second = means_by_item(before.items), means_by_item(after.items)
    asked, again = ({item.key.place: (item.question, item.gold) for item in side.items} for side in (before, after))
    pairs = {place: (first[place], second[place]) for place in sorted(first.keys() & second.keys())}
    if not pairs:
        raise EvaluationError("the two evaluations have no scored item in common; evaluate both on the same benchmarks")
    changed = [place for place in pairs if asked[place] != again[place]]
    if changed:
        raise EvaluationError(
            f"{len(changed)} items have the same id and another question or reference, first {'/'.join(changed[0])}; "
            "evaluate both on the same files"
        )
    return pairs, sorted((asked.keys() & again.keys()) - pairs.keys())


def _row(pairs: Pairs, compared: PairedComparison) -> ComparedRates:
    discordant = sum((second - first) ** 2 for first, second in pairs.values()) / len(pairs)
    return {
        "num_items": compared.num_tasks,
        "before": compared.before,
        "after": compared.after,
        "gain": compared.gain,
        "only_before": compared.only_before,
        "only_after": compared.only_after,
        "gain_ci95": compared.ci95,
        "test": compared.test,
        "p": compared.p,
        "discordant": discordant,
        "items_for_this_gain": items_needed(compared.gain, discordant),
        "items_for": {f"{gain:g}": items_needed(gain, discordant) for gain in ASKED_GAINS},
    }


def _table(result: Comparison) -> Table:
    table = Table(title=escape(visible(f"{result['before']} -> {result['after']}")), title_justify="left")
    for column in ("benchmark", "items", "before", "after", "gain", "95% interval", "p", "items for this gain"):
        table.add_column(column)
    rows = result["benchmarks"] | ({"all": result["all"]} if len(result["benchmarks"]) > 1 else {})
    for name, row in rows.items():
        rates = percent(row["before"]), percent(row["after"]), points([row["gain"]], signed=True)
        needed = str(row["items_for_this_gain"] or "")
        interval = points(row["gain_ci95"], signed=True)
        table.add_row(Text(visible(name)), str(row["num_items"]), *rates, interval, f"{row['p']:.3g}", needed)
    return table


def write_comparison_page(folder: Path, sides: tuple[StoredEvaluation, StoredEvaluation], result: Comparison) -> Path:
    """Write `report.html` into a folder. Raises OSError."""
    whole = result["all"]
    if result["differs_in"]:
        answer, kind = f"This cannot be decided: they also differ in {', '.join(result['differs_in'])}.", "unsure"
    elif whole["p"] >= 0.05:
        answer, kind = "This comparison does not show it.", "unsure"
    else:
        answer, kind = ("Yes.", "better") if whole["gain"] > 0 else ("No, it is worse.", "unsure worse")
    # Tasks of another source may have the name of a benchmark.
    known = set(BENCHMARKS).intersection(*(side.benchmarks for side in sides))

    def title_of(name: str) -> str:
        return BENCHMARKS[name].title if name in known else name

    bars = []
    for name, row in result["benchmarks"].items():
        count = row["num_items"]
        for side, rate in (("before", row["before"]), ("after", row["after"])):
            interval = wilson_interval(rate * count, count)
            bars.append(
                Rate(label=title_of(name), note=f"{side}, {count} items", rate=rate, interval=interval, kind=side)
            )
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
        facts=list(fact_rows(title_of, *(side.identity for side in sides))),
        provenance=sides[1].provenance,
        title_of=title_of,
    )
