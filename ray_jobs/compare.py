"""Compare two evaluations of the same items: paired, with a test, intervals, and how many items a claim would need."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from configs.errors import UserError, visible
from ray_jobs.evaluation_folder import (
    IDENTITY,
    EvaluationError,
    Item,
    Place,
    StoredEvaluation,
    check_no_run,
    means_by_item,
    phases_of_run,
    read_evaluation,
    unscored_by_reason,
)
from ray_jobs.evaluation_identity import differences, unproven
from ray_jobs.run.folder import write_json
from ray_jobs.statistics import PairedComparison, compare_means, compare_paired, items_needed
from ray_jobs.viewer.evaluation import write_comparison_page
from ray_jobs.viewer.render import percent, points

ASKED_GAINS = (0.02, 0.05, 0.1)
"""Differences for which the number of items is always told, besides the one that was seen."""


class ComparisonError(UserError):
    """Two evaluations that must not be compared; the message says why, and what to do."""


class ComparedRates(TypedDict):
    """Of the items that are paired. `discordant` is the mean squared difference: for one seed, the share of items that
    exactly one side solves. `items_for` are the paired items that a true gain of so much would take."""

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
    items_for_this_gain: int | None
    items_for: dict[str, int | None]


class Comparison(TypedDict):
    """Where there are two values, they are those of the two sides."""

    before: str
    after: str
    differs_in: list[str]
    unproven: list[str]
    infrastructure_failures: list[int]
    undecided: list[int]
    left_out: list[str]
    left_out_because: list[str]
    num_seeds: list[int]
    all: ComparedRates
    benchmarks: dict[str, ComparedRates]
    verdict: str


Pairs = Mapping[Place, tuple[float, float]]
"""Results of two sides on the same items: means over seeds."""


def run_compare(before: Path, after: Path | None, *, out: Path | None, anyway: bool) -> Path:
    """Print and write the comparison, below the second folder by default; returns the page. Without `after`, `before`
    is the folder of a training run, and its own phases are compared. Raises ComparisonError for evaluations that differ
    in more than their policy, unless `anyway`, which says so on the page."""
    sides = phases_of_run(before) if after is None else (read_evaluation(before), read_evaluation(after))
    differing = differences(sides[0].identity, sides[1].identity)
    if differing and not anyway:
        raise ComparisonError(
            f"'{sides[0].path}' and '{sides[1].path}' differ in {', '.join(differing)}, and not in the policy alone: "
            "what is seen could come from there. Evaluate both with the same settings; --anyway compares the items "
            "that both have, and says so"
        )
    result = comparison(*sides, differing=differing)
    folder = out or (before / "comparison" if after is None else after / f"against-{before.resolve().name}")
    _check_nothing_is_lost(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", result)
    page = write_comparison_page(folder, sides, result)
    console = Console()
    console.print(_table(result))
    console.print(result["verdict"])
    console.print(f"report: {page}", markup=False, soft_wrap=True)
    return page


def _check_nothing_is_lost(folder: Path) -> None:
    """Raises EvaluationError where the report would take the place of another one."""
    check_no_run(folder)
    if (folder / IDENTITY).exists():
        raise EvaluationError(
            f"'{folder}' is the folder of an evaluation, whose report would be written over; name another folder with "
            "--out"
        )


def comparison(before: StoredEvaluation, after: StoredEvaluation, *, differing: list[str] | None = None) -> Comparison:
    """Raises ComparisonError where an item is not the same on both sides, or none is on both."""
    pairs, left_out = _paired(before, after)
    seeds = {side.identity["sampling"]["seeds"] for side in (before, after)}
    compare = compare_paired if seeds == {1} else compare_means
    whole = compare(*_sides(pairs))
    benchmarks = sorted({benchmark for benchmark, _ in pairs})
    parts = {name: {place: pairs[place] for place in pairs if place[0] == name} for name in benchmarks}
    return {
        "before": before.name,
        "after": after.name,
        "differs_in": differing or [],
        "unproven": sorted({*unproven(before.identity), *unproven(after.identity)}),
        "infrastructure_failures": [sum(item.broke_off for item in side.items.values()) for side in (before, after)],
        "undecided": [sum(item.undecided for item in side.items.values()) for side in (before, after)],
        "left_out": ["/".join(place) for place in left_out],
        "left_out_because": list(unscored_by_reason(_results(left_out, before, after))),
        "num_seeds": sorted(seeds),
        "all": _row(pairs, whole),
        "benchmarks": {name: _row(part, compare(*_sides(part))) for name, part in parts.items()},
        "verdict": whole.verdict[0].upper() + whole.verdict[1:],
    }


def _paired(before: StoredEvaluation, after: StoredEvaluation) -> tuple[Pairs, list[Place]]:
    """The items of both sides: those that are compared, and those that are not, because one side has no scored result
    of them."""
    first, second = (means_by_item(side.items.values()) for side in (before, after))
    asked, again = (
        {key.place: (item.question, item.gold) for key, item in side.items.items()} for side in (before, after)
    )
    pairs = {place: (first[place], second[place]) for place in sorted(first.keys() & second.keys())}
    if not pairs:
        raise ComparisonError(
            "the two evaluations have no item in common that both could score; evaluate both on the same benchmarks"
        )
    changed = [place for place in pairs if asked[place] != again[place]]
    if changed:
        raise ComparisonError(
            f"{len(changed)} items have the same id and another question or reference, first {'/'.join(changed[0])}; "
            "evaluate both on the same files"
        )
    return pairs, sorted((asked.keys() & again.keys()) - pairs.keys())


def _sides(pairs: Pairs) -> tuple[list[float], list[float]]:
    return [before for before, _ in pairs.values()], [after for _, after in pairs.values()]


def _results(places: Sequence[Place], *sides: StoredEvaluation) -> Iterator[Item]:
    """Those of the items at these places, under all seeds of all sides."""
    wanted = set(places)
    for side in sides:
        yield from (item for key, item in side.items.items() if key.place in wanted)


def _row(pairs: Pairs, compared: PairedComparison) -> ComparedRates:
    squares = [(second - first) ** 2 for first, second in pairs.values()]
    discordant = sum(squares) / len(squares)
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
    rows = dict(result["benchmarks"])
    if len(rows) > 1:
        rows["all"] = result["all"]
    for name, row in rows.items():
        table.add_row(
            Text(visible(name)),
            str(row["num_items"]),
            percent(row["before"]),
            percent(row["after"]),
            points([row["gain"]], signed=True),
            points(row["gain_ci95"], signed=True),
            f"{row['p']:.3g}",
            str(row["items_for_this_gain"] or ""),
        )
    return table
