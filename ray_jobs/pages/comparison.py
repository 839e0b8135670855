"""The page of a comparison: the honest verdict, benchmark by benchmark, and the proof that only the policy differs."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from ray_jobs.evaluation.folder import StoredEvaluation
from ray_jobs.pages.charts import Bar, bar_chart
from ray_jobs.pages.evaluation import identity_table, interval, origin, title_of
from ray_jobs.pages.render import page_of, percent, table
from reward.paired import wilson_interval

REPORT = "report.html"


def write_comparison_page(
    folder: Path, sides: tuple[StoredEvaluation, StoredEvaluation], result: Mapping[str, Any]
) -> Path:
    """Write `report.html` into `folder`."""
    sections = {
        "Before and after": _bars(result) + _rows(result),
        "How many items would it take?": _power(result),
        "Proof that only the policy differs": _proof(result, one_run=sides[0].path == sides[1].path)
        + identity_table({"before": sides[0].identity, "after": sides[1].identity}),
    }
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections.items())
    page = page_of("comparison", _headline(result) + body + origin(sides[1].provenance))
    path = folder / REPORT
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def _headline(result: Mapping[str, Any]) -> str:
    whole = result["all"]
    if result["differs_in"]:
        answer, kind = f"This cannot be told: they also differ in {', '.join(result['differs_in'])}.", "unsure"
    elif whole["p"] >= 0.05:
        answer, kind = "This comparison does not show it.", "unsure"
    else:
        answer, kind = ("Yes.", "better") if whole["gain"] > 0 else ("No, it is worse.", "unsure worse")
    failures = result["infrastructure_failures"]
    failed = (
        f" Infrastructure failures, counted as not solved: {failures[0]} before, {failures[1]} after."
        if any(failures)
        else ""
    )
    return (
        "<h1>Is the second policy better?</h1>"
        f'<p class="soft">{escape(result["before"])} &rarr; {escape(result["after"])}</p>'
        f'<p class="verdict {kind}"><b>{escape(answer)}</b> On {whole["num_items"]} paired items: '
        f"<b>{percent(whole['before'])}</b> before, <b>{percent(whole['after'])}</b> after. "
        f"{escape(result['verdict'])}.{failed}</p>"
    )


def _bars(result: Mapping[str, Any]) -> str:
    bars = []
    for name, row in result["benchmarks"].items():
        for kind in ("before", "after"):
            rate, count = row[kind], row["num_items"]
            low, high = wilson_interval(rate * count, count)
            note = f"{kind}, {count} items"
            bars.append(Bar(label=title_of(name), note=note, rate=rate, low=low, high=high, kind=kind))
    note = "Whiskers: 95% Wilson intervals of each rate. They may overlap where a paired difference is significant."
    return bar_chart(bars) + f'<p class="soft">{note}</p>'


def _rows(result: Mapping[str, Any]) -> str:
    rows = []
    for name, row in [*result["benchmarks"].items(), ("all", result["all"])]:
        rows.append(
            (
                title_of(name),
                str(row["num_items"]),
                percent(row["before"]),
                percent(row["after"]),
                f"{100 * row['gain']:+.1f}",
                interval(row["gain_ci95"], signed=True),
                f"{row['only_before']} / {row['only_after']}",
                f"{row['p']:.3g}",
            )
        )
    if result["num_seeds"] == [1]:
        method, differing = "The interval is Newcombe's, and p that of the exact McNemar test.", "only before / after"
    else:
        method = (
            "Each item counts by its mean over the seeds. p is that of the exact paired sign-flip permutation test, "
            "and the interval holds the gains that this test does not refuse."
        )
        differing = "higher before / after"
    header = ("benchmark", "items", "before", "after", "gain", "95% interval", differing, "p")
    note = (
        f"Gains are in points. {method} No p is corrected for the {len(result['benchmarks'])} benchmarks that are "
        "looked at."
    )
    return table(header, rows) + f'<p class="soft">{note}</p>'


def _power(result: Mapping[str, Any]) -> str:
    gains = list(result["all"]["items_for"])
    rows = [
        (
            title_of(name),
            str(row["num_items"]),
            str(row["items_for_this_gain"] or "no gain seen"),
            *(str(row["items_for"][gain]) for gain in gains),
        )
        for name, row in [*result["benchmarks"].items(), ("all", result["all"])]
    ]
    header = ("benchmark", "items here", "for the gain seen", *(f"for {100 * float(gain):g} points" for gain in gains))
    note = (
        "Paired items in which the test at 5% would find a true difference of this size with a power of 80%, if the "
        "items differ between the sides as much as they did here."
    )
    return table(header, rows) + f'<p class="soft">{note}</p>'


def _proof(result: Mapping[str, Any], *, one_run: bool) -> str:
    if result["differs_in"]:
        parts = escape(", ".join(result["differs_in"]))
        return f'<p class="wrong">The two sides also differ in: {parts}. What is seen could come from there.</p>'
    told = "".join(f" The server does not tell the {name}: there it is a claim." for name in result["unproven"])
    if one_run:
        return "<p>Both are phases of one run: one base model, one code, one configuration and the same items.</p>"
    parts = "Verifier, generator, quantisation, sampling, agent, tools, memory, judge and items"
    return f"<p>{parts} are equal, by digest.{told}</p>"
