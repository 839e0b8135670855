"""The pages of one evaluation and of a comparison of two: what was solved, how sure that is, and what that is proof
of."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from envs.datasets.benchmarks import BENCHMARKS, Benchmark
from ray_jobs.evaluation_folder import ITEMS, BenchmarkRates, EvaluationSummary, StoredEvaluation, why_unscored
from ray_jobs.evaluation_identity import Items, digest_of
from ray_jobs.statistics import wilson_interval
from ray_jobs.viewer.charts import Bar
from ray_jobs.viewer.render import write_page
from rollout.filters import SOLVED
from rollout.records import read_records

if TYPE_CHECKING:
    # It writes the page.
    from ray_jobs.compare import Comparison

_DIGEST = re.compile(r"\b[0-9a-f]{40,64}\b")
_PROOF = {
    "verifier": "verifier, never trained",
    "generator": "generator, never trained",
    "quantisation": "quantisation of the weights",
    "sampling": "sampling",
    "agent": "digest of the agent's code",
    "prompt": "digest of the planner's instructions and examples",
    "tools": "digest of the tools' settings and code",
    "memory": "hints of earlier tasks",
    "scorer": "digest of the scorers' code",
    "judge": "judge of short answers",
}


def write_evaluation_page(out: Path, stored: StoredEvaluation, summary: EvaluationSummary) -> Path:
    """Write `report.html` into the folder of the evaluation. Raises OSError."""
    policy, rows, known = stored.identity["policy"], summary["benchmarks"], known_benchmarks(stored)
    return write_page(
        out / "report.html",
        "evaluation",
        folder=out.name,
        policy=stored.name,
        untouched=policy["backend"] == "vllm" and policy["adapter"] is None,
        summary=summary,
        why_unscored=why_unscored(stored.items.values()),
        bars=[_bar(name, row, known.get(name)) for name, row in rows.items() if row["num_scored"]],
        judged={name: row["judge"] for name, row in rows.items() if row["judge"]},
        searched={name: row["leaks"] for name, row in rows.items() if row["leaks"]["searched"]},
        facts=list(identity_rows(stored)),
        examples=_examples(stored.path),
        provenance=stored.provenance,
        title_of=titles(known),
    )


def known_benchmarks(*sides: StoredEvaluation) -> Mapping[str, Benchmark]:
    """Those that all sides were asked for: tasks of another source may go by the name of one."""
    asked = set(BENCHMARKS).intersection(*(side.benchmarks for side in sides))
    return {name: BENCHMARKS[name] for name in asked}


def titles(known: Mapping[str, Benchmark]) -> Callable[[str], str]:
    """A benchmark's own title; any other data set has its name only."""
    return lambda name: known[name].title if name in known else name


def identity_rows(*sides: StoredEvaluation) -> Iterator[tuple[str, ...]]:
    """Rows of words, one column for each evaluation: the policy, then what must be the same in all of them."""
    identities, title_of = [side.identity for side in sides], titles(known_benchmarks(*sides))
    policies: list[Mapping[str, object]] = [one["policy"] for one in identities]
    for key in dict.fromkeys(key for one in policies for key in one):
        yield key.replace("_", " "), *(_short(one.get(key)) for one in policies)
    for key, label in _PROOF.items():
        yield label, *(_proof(key, one.get(key)) for one in identities)
    for name in dict.fromkeys(name for one in identities for name in one["items"]):
        yield f"items of {title_of(name)}", *(_items(one["items"].get(name)) for one in identities)


def _bar(name: str, row: BenchmarkRates, known: Benchmark | None) -> Bar:
    count, rate = row["num_scored"], row["solve_rate"] or 0.0
    label, note = (known.title, f"{count} of {known.count} items") if known else (name, f"{count} items")
    return Bar(label=label, note=note, rate=rate, interval=row["solve_rate_ci95"], kind="after")


def _examples(out: Path) -> dict[str, Mapping[str, object]]:
    """The first item that was solved and the first that was not, by title."""
    found: dict[str, Mapping[str, object]] = {}
    for record in read_records(out / ITEMS):
        if record["reward"] is None:
            continue
        found.setdefault("A solved item" if record["reward"] == SOLVED else "An item that was not solved", record)
        if len(found) == 2:
            break
    return dict(sorted(found.items(), reverse=True))


def _proof(key: str, value: object) -> str:
    if key in ("tools", "prompt") and value is not None:
        return digest_of(value)[:12]
    if key == "quantisation" and isinstance(value, Mapping) and value["weights"] is None:
        return "not told by the server"
    return _short(value)


def _items(row: Items | None) -> str:
    return f"{row['count']}, {row['digest'][:12]}" if row else "none"


def _short(value: object) -> str:
    """Digests by their first characters; they are whole in evaluation.json."""
    if isinstance(value, Mapping):
        said = {name: part for name, part in value.items() if part is not None}
        return ", ".join(f"{name.replace('_', ' ')} {_short(part)}" for name, part in said.items())
    return "none" if value is None else _DIGEST.sub(lambda match: match[0][:12], str(value))


def write_comparison_page(folder: Path, sides: tuple[StoredEvaluation, StoredEvaluation], result: "Comparison") -> Path:
    """Write `report.html` into `folder`. Raises OSError."""
    answer, kind = _answer(result)
    title_of = titles(known_benchmarks(*sides))
    return write_page(
        folder / "report.html",
        "comparison",
        answer=answer,
        kind=kind,
        result=result,
        bars=list(_bars(result, title_of)),
        rows={**result["benchmarks"], "all": result["all"]},
        gains=[f"for {100 * float(gain):g} points" for gain in result["all"]["items_for"]],
        one_run=sides[0].path == sides[1].path,
        facts=list(identity_rows(*sides)),
        provenance=sides[1].provenance,
        title_of=title_of,
    )


def _answer(result: "Comparison") -> tuple[str, str]:
    """The answer, and its kind in style.css."""
    if result["differs_in"]:
        return f"This cannot be told: they also differ in {', '.join(result['differs_in'])}.", "unsure"
    if result["all"]["p"] >= 0.05:
        return "This comparison does not show it.", "unsure"
    return ("Yes.", "better") if result["all"]["gain"] > 0 else ("No, it is worse.", "unsure worse")


def _bars(result: "Comparison", title_of: Callable[[str], str]) -> Iterator[Bar]:
    for name, row in result["benchmarks"].items():
        count = row["num_items"]
        for kind, rate in (("before", row["before"]), ("after", row["after"])):
            interval = wilson_interval(rate * count, count)
            yield Bar(label=title_of(name), note=f"{kind}, {count} items", rate=rate, interval=interval, kind=kind)
