"""The page of a comparison: the honest verdict, benchmark by benchmark, and the proof that only the policy differs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ray_jobs.evaluation.folder import StoredEvaluation
from ray_jobs.pages.charts import Bar
from ray_jobs.pages.evaluation import identity_rows, title_of
from ray_jobs.pages.render import write_page
from reward.paired import wilson_interval


def write_comparison_page(
    folder: Path, sides: tuple[StoredEvaluation, StoredEvaluation], result: Mapping[str, Any]
) -> Path:
    """Write `report.html` into `folder`. Raises OSError."""
    answer, kind = _answer(result)
    return write_page(
        folder / "report.html",
        "comparison",
        answer=answer,
        kind=kind,
        result=result,
        bars=list(_bars(result)),
        rows={**result["benchmarks"], "all": result["all"]},
        gains=[f"for {100 * float(gain):g} points" for gain in result["all"]["items_for"]],
        one_run=sides[0].path == sides[1].path,
        facts=list(identity_rows(*(side.identity for side in sides))),
        provenance=sides[1].provenance,
        title_of=title_of,
    )


def _answer(result: Mapping[str, Any]) -> tuple[str, str]:
    """The answer, and its kind in style.css."""
    if result["differs_in"]:
        return f"This cannot be told: they also differ in {', '.join(result['differs_in'])}.", "unsure"
    if result["all"]["p"] >= 0.05:
        return "This comparison does not show it.", "unsure"
    return ("Yes.", "better") if result["all"]["gain"] > 0 else ("No, it is worse.", "unsure worse")


def _bars(result: Mapping[str, Any]) -> Iterator[Bar]:
    for name, row in result["benchmarks"].items():
        for kind in ("before", "after"):
            rate, count = row[kind], row["num_items"]
            interval = wilson_interval(rate * count, count)
            yield Bar(label=title_of(name), note=f"{kind}, {count} items", rate=rate, interval=interval, kind=kind)
