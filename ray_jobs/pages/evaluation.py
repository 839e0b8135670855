"""The page of an evaluation: what was solved, how sure that is, and the proof of what was evaluated."""

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from envs.benchmarks.registry import BENCHMARKS
from ray_jobs.evaluation.folder import ITEMS, StoredEvaluation
from ray_jobs.evaluation.identity import digest_of
from ray_jobs.pages.charts import Bar, bar_chart
from ray_jobs.pages.render import facts_table, page_of, percent, shown, table
from ray_jobs.pages.trajectory_cards import titled_cards
from rollout.records import read_records

REPORT = "report.html"
_DIGEST = re.compile(r"\b[0-9a-f]{40,64}\b")
_PROOF = {
    "verifier": "verifier, never trained",
    "generator": "generator, never trained",
    "quantisation": "quantisation of the weights",
    "sampling": "sampling",
    "agent": "digest of the agent's code and prompts",
    "tools": "digest of the tools' settings",
    "memory": "hints of earlier tasks",
    "judge": "judge of short answers",
}


def write_evaluation_page(out: Path, stored: StoredEvaluation, summary: Mapping[str, Any]) -> Path:
    """Write `report.html` into the folder of the evaluation."""
    sections = {
        "By benchmark": _bars(summary) + _rates(summary),
        "A language model's word, apart": _judge(summary),
        "Leakage audit": _leaks(summary),
        "What was evaluated": identity_table({"": stored.identity}) + _evidence(summary),
        "Trajectories to read": _examples(stored.path),
    }
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections.items() if content)
    page = page_of(f"{out.name}: evaluation", _headline(stored, summary) + body + origin(stored.provenance))
    path = out / REPORT
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def title_of(benchmark: str) -> str:
    """The benchmark's own name; a family of generated tasks has its name only."""
    return BENCHMARKS[benchmark].title if benchmark in BENCHMARKS else benchmark


def interval(ends: tuple[float, float] | list[float], *, signed: bool = False) -> str:
    low, high = (f"{100 * end:{'+' if signed else ''}.1f}" for end in ends)
    return f"{low} to {high}"


def identity_table(identities: Mapping[str, Mapping[str, Any]]) -> str:
    """One column for each evaluation: the policy first, then what must be the same on both sides."""
    keys = list(dict.fromkeys(key for one in identities.values() for key in one["policy"]))
    rows = [(key.replace("_", " "), *(_short(one["policy"].get(key)) for one in identities.values())) for key in keys]
    rows += [(label, *(_proof(key, one[key]) for one in identities.values())) for key, label in _PROOF.items()]
    names = list(dict.fromkeys(name for one in identities.values() for name in one["items"]))
    rows += [(f"items of {title_of(name)}", *(_items(one, name) for one in identities.values())) for name in names]
    return facts_table(("", *identities), rows)


def origin(provenance: Mapping[str, Any]) -> str:
    said = {key: escape(shown(value)) for key, value in provenance.items()}
    dirty = " with uncommitted changes" if provenance.get("git_dirty") else ""
    return (
        f"<footer><h2>How to get these numbers again</h2><p><code>{said.get('command')}</code></p>"
        f"<p>Seed {said.get('seed')}, commit {said.get('git_commit')}{dirty}, started {said.get('started')}.<br>"
        f"{said.get('cpu')}, {said.get('cores')} cores, {said.get('memory_gib')} GiB, {said.get('platform')}.<br>"
        f"python {said.get('python')}, {said.get('versions')}</p></footer>"
    )


def _headline(stored: StoredEvaluation, summary: Mapping[str, Any]) -> str:
    seeds = summary["num_seeds"]
    tries = "one try each" if seeds == 1 else f"{seeds} seeds each"
    policy = stored.identity["policy"]
    untouched = policy["backend"] == "vllm" and policy["adapter"] is None
    name = f"{stored.name}, untouched" if untouched else stored.name
    failures = summary["infrastructure_failures"]
    failed = (
        f" <b>{failures} results are infrastructure failures</b>: they count as not solved, and the same command tries "
        "only these again."
        if failures
        else " The infrastructure failed on none of them."
    )
    return (
        f"<h1>What does the policy solve?</h1><p class='soft'>{escape(name)}</p>"
        f'<p class="verdict{" unsure" if failures else ""}"><b>{percent(summary["solve_rate"])}</b> of '
        f"{summary['num_items']} items, {tries} (95% interval {interval(summary['solve_rate_ci95'])}%); "
        f"{percent(summary['mean_over_benchmarks'])} as the mean over {len(summary['benchmarks'])} benchmarks. "
        f"Every item is in the denominator.{failed}</p>"
    )


def _bars(summary: Mapping[str, Any]) -> str:
    bars = []
    for name, row in summary["benchmarks"].items():
        low, high = row["solve_rate_ci95"]
        count = row["num_items"]
        note = f"{count} items" if name not in BENCHMARKS else f"{count} of {BENCHMARKS[name].count} items"
        bars.append(Bar(label=title_of(name), note=note, rate=row["solve_rate"], low=low, high=high, kind="after"))
    return (
        bar_chart(bars) + '<p class="soft">Solved by the exact scorer. Whiskers: 95% Wilson intervals over items.</p>'
    )


def _rates(summary: Mapping[str, Any]) -> str:
    rows = []
    for name, row in summary["benchmarks"].items():
        spread = row["spread_over_seeds"]
        rows.append(
            (
                title_of(name),
                str(row["num_items"]),
                percent(row["solve_rate"]),
                f"{interval(row['solve_rate_ci95'])}%",
                "" if row["f1"] is None else f"{100 * row['f1']:.1f}",
                "" if spread is None else f"{100 * spread:.1f}",
                str(row["no_answer"]),
                str(row["infrastructure_failures"]),
                f"{row['turns']:.1f}",
            )
        )
    header = ("benchmark", "items", "solved", "95% interval", "token F1", "std over seeds", "no answer")
    return table((*header, "infrastructure failures", "turns"), rows)


def _judge(summary: Mapping[str, Any]) -> str:
    rows = [
        (
            title_of(name),
            *(str(row["judge"][key]) for key in ("asked", "accepted", "silent")),
            percent(row["judge"]["solve_rate_with_judge"]),
        )
        for name, row in summary["benchmarks"].items()
        if row["judge"]
    ]
    note = "Asked only where an answer equals no reference. None of it is in the numbers above."
    header = ("benchmark", "asked", "accepted", "no verdict", "solved with it")
    return table(header, rows) + f'<p class="soft">{note}</p>' if rows else ""


def _leaks(summary: Mapping[str, Any]) -> str:
    rows = [
        (title_of(name), str(leaks["searched"]), str(len(leaks["leaked"])), percent(leaks["share"]))
        for name, row in summary["benchmarks"].items()
        if (leaks := row["leaks"])["searched"]
    ]
    if not rows:
        return "<p>No tool brought in a text from outside, so none can have brought in a question with its answer.</p>"
    note = (
        "A result is leaked where most of its question was found in what the tools brought in: the page that holds the "
        "question most likely holds its answer."
    )
    return table(("benchmark", "results with a search", "leaked", "share of all"), rows) + f'<p class="soft">{note}</p>'


def _evidence(summary: Mapping[str, Any]) -> str:
    calls, foreign = summary["frozen_calls"], summary["foreign_calls"]
    frozen = (
        f"{calls} calls of verifier and generator, {calls - foreign} of them answered by the frozen base."
        if calls
        else "Verifier and generator are rules: they asked no model."
    )
    versions = ", ".join("the untouched model" if one == -1 else str(one) for one in summary["planner_versions"])
    told = "".join(f" The server does not tell the {name}: it is not proven." for name in summary["unproven"])
    alarm = ' class="wrong"' if foreign else ""
    return f"<p{alarm}>{frozen} The planner's calls were answered by policy version {versions or 'none'}.{told}</p>"


def _examples(out: Path) -> str:
    found: dict[str, Mapping[str, Any]] = {}
    for record in read_records(out / ITEMS):
        found.setdefault("A solved item" if record["reward"] == 1.0 else "An item that was not solved", record)
        if len(found) == 2:
            break
    return titled_cards(dict(sorted(found.items(), reverse=True)))


def _proof(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if key == "tools":
        return digest_of(value)[:12]
    if key == "quantisation" and value["weights"] is None:
        return "not told by the server"
    return _short(value)


def _items(identity: Mapping[str, Any], name: str) -> str:
    row = identity["items"].get(name)
    return f"{row['count']}, {row['digest'][:12]}" if row else "none"


def _short(value: Any) -> str:
    """Digests by their first characters; they are whole in evaluation.json."""
    if isinstance(value, Mapping):
        said = {name: part for name, part in value.items() if part is not None}
        return ", ".join(f"{name.replace('_', ' ')} {_short(part)}" for name, part in said.items())
    if value is None:
        return "none"
    text = str(value)
    return _DIGEST.sub(lambda match: match[0][:12], text)
