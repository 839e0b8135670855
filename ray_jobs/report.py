"""The report of a run: one page that stands alone, for people who look before they read."""

import json
import math
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ray_jobs.charts import Bar, bar_chart, line_chart
from reward.paired import wilson_interval
from rollout.records import read_records

_STYLE = Path(__file__).with_name("report.css")
_KEY_NUMBERS = {
    "wall_s": "wall time, all phases (s)",
    "train_wall_s": "wall time, RL (s)",
    "num_steps": "train steps",
    "num_trajectories": "trajectories",
    "trajectories_per_s": "trajectories per second",
    "rollout_tokens_per_s": "sampled tokens per second",
    "learner_tokens_per_s": "learner tokens per second (shared prefixes once)",
    "learner_wait_s": "learner waited for rollouts (s)",
    "staleness": "staleness (policy versions)",
    "groups": "groups",
    "versions_published": "policy versions published",
    "versions_acked": "policy versions acknowledged with a matching digest",
    "logprob_gap_version0": "mean |log-prob gap| engine to learner at version 0",
}


def write_report(run_dir: Path) -> Path:
    """Render `report.html` from the files of the run folder; what is missing is named on the page."""
    summary = _read_json(run_dir / "summary.json")
    metrics = _read_lines(run_dir / "metrics.jsonl")
    records = _read_lines(run_dir / "trajectories.jsonl")
    body = "".join(
        (
            _headline(summary),
            _section("Before and after", _bars(summary) + _by_dataset(summary)),
            _section("Learning", _curves(metrics)),
            _section("Three trajectories to read", _trajectories(records)),
            _section("Numbers", _numbers(summary)),
            _footer(run_dir, summary),
        )
    )
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run_dir.name)}: report</title><style>{_STYLE.read_text()}</style><body>{body}</body></html>"
    )
    path = run_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _headline(summary: Mapping[str, Any]) -> str:
    verdict = summary.get("verdict")
    if verdict is None:
        return '<h1>A run that did not finish</h1><p class="verdict unsure">There is no summary to judge by.</p>'
    unsure = " unsure" if "NOT significant" in verdict else ""
    return (
        "<h1>Did reinforcement learning make the planner better?</h1>"
        f'<p class="verdict{unsure}">On {summary["num_eval_tasks"]} held-out tasks: '
        f"<b>{100 * summary['solve_rate_before']:.1f}%</b> solved after the cold start, "
        f"<b>{100 * summary['solve_rate_after']:.1f}%</b> after RL. {escape(verdict[0].upper() + verdict[1:])}.</p>"
    )


def _bars(summary: Mapping[str, Any]) -> str:
    bars = []
    for kind, label, count_key in (
        ("untouched", "untouched model", "num_untouched_tasks"),
        ("before", "cold-started", "num_eval_tasks"),
        ("after", "after RL", "num_eval_tasks"),
    ):
        rate, count = summary.get(f"solve_rate_{kind}"), summary.get(count_key)
        if rate is not None and count:
            low, high = wilson_interval(round(rate * count), count)
            bars.append(Bar(label=label, note=f"{count} tasks", rate=rate, low=low, high=high, kind=kind))
    start = summary.get("cold_start", {})
    note = (
        f"The cold start imitated {start.get('num_demonstrations')} scripted demonstrations on training tasks, of "
        f"which {start.get('num_right')} were right; the others were wrong on purpose, so that there was something "
        "left to learn. Whiskers are 95% Wilson intervals. Decoding is greedy; a trajectory that failed counts as "
        "wrong. The untouched model was given the first of the same tasks."
    )
    return bar_chart(bars) + f'<p class="soft">{escape(note)}</p>'


def _by_dataset(summary: Mapping[str, Any]) -> str:
    rows = [
        (name, str(row["num"]), f"{100 * row['before']:.1f}%", f"{100 * row['after']:.1f}%")
        for name, row in summary.get("by_dataset", {}).items()
    ]
    return _table(("data set", "tasks", "cold-started", "after RL"), rows)


def _curves(metrics: Iterable[Mapping[str, Any]]) -> str:
    rows = [row for row in metrics if "rollout/solve_rate" in row]
    steps = [float(row["step"]) for row in rows]
    rates = {
        "solve rate while sampling, all drawn groups": [row["rollout/solve_rate"] for row in rows],
        "share of groups with signal": [row["rollout/groups_kept_share"] for row in rows],
    }
    times = {
        "seconds the learner worked": [row["learner/step_s"] for row in rows],
        "seconds it waited for rollouts": [row["learner/wait_s"] for row in rows],
    }
    longest = max((value for values in times.values() for value in values), default=1.0)
    top = 8 * math.ceil(max(longest, 1.0) / 8)
    return (
        line_chart(steps, rates, top=1.0, title="learning curve over train steps")
        + "<p class='soft'>Both over train steps; below, where a step's time went.</p>"
        + line_chart(steps, times, top=top, title="time per train step")
    )


def _trajectories(records: Iterable[Mapping[str, Any]]) -> str:
    """A task that RL turned from wrong to right, both ways, and one that the trained policy still fails."""
    phases: dict[str, dict[str, Mapping[str, Any]]] = {"eval_before": {}, "eval_after": {}}
    for record in records:
        if record["phase"] in phases:
            phases[record["phase"]][record["task_id"]] = record
    before, after = phases["eval_before"], phases["eval_after"]
    turned = [id for id, one in after.items() if one["reward"] == 1 and before.get(id, one)["reward"] == 0]
    failed = [id for id, one in after.items() if one["reward"] == 0]
    cards = []
    if turned:
        cards += [_card("Before RL", before[turned[0]]), _card("The same task after RL", after[turned[0]])]
    if failed:
        cards.append(_card("A task the trained policy still fails", after[failed[0]]))
    return "".join(cards) or "<p>No trajectories were recorded.</p>"


def _card(title: str, record: Mapping[str, Any]) -> str:
    right = record["reward"] == 1
    answer = record["answer"] if record["answer"] is not None else f"no answer ({record['stop_reason']})"
    return (
        f'<div class="card"><b>{escape(title)}</b><p>{escape(record["question"])}</p>'
        + "".join(map(_step, record["turns"]))
        + f'<p>Answer: <b class="{"right" if right else "wrong"}">{escape(answer)}</b>, '
        f"the reference is {escape(record['gold'])}</p></div>"
    )


def _step(turn: Mapping[str, Any]) -> str:
    if turn["format_error"]:
        return (
            f'<div class="step"><span class="wrong">malformed</span>: {escape(turn["format_error"])}<br>'
            f"<code>{escape(turn['text'])}</code></div>"
        )
    result = f"<br>&rarr; {escape(turn['result'] or '')}" if turn["action"] not in ("answer", "think") else ""
    return (
        f'<div class="step"><span class="action">{escape(turn["action"] or turn["role"])}</span> '
        f"<code>{escape(turn['action_input'] or turn['text'])}</code> "
        f'<span class="soft">{escape(turn["thought"])}</span>{result}</div>'
    )


def _numbers(summary: Mapping[str, Any]) -> str:
    rows = [(label, _shown(summary.get(key))) for key, label in _KEY_NUMBERS.items()]
    rows += [(f"phase: {name} (s)", _shown(seconds)) for name, seconds in summary.get("phases", {}).items()]
    return _table(("", "value"), rows)


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _footer(run_dir: Path, summary: Mapping[str, Any]) -> str:
    origin = _read_json(run_dir / "provenance.json")
    machine = (
        f"{origin.get('cpu')}, {origin.get('cores')} cores, {origin.get('memory_gib')} GiB, {origin.get('platform')}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in origin.get("versions", {}).items())
    dirty = " (with uncommitted changes)" if origin.get("git_dirty") else ""
    return (
        f"<footer><h2>How to get these numbers again</h2><p><code>{escape(str(origin.get('command')))}</code></p>"
        f"<p>Seed {escape(str(summary.get('seed')))}, commit {escape(str(origin.get('git_commit')))}{dirty}, started "
        f"{escape(str(origin.get('started')))}.<br>{escape(machine)}<br>{escape(versions)}</p></footer>"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return list(read_records(path)) if path.exists() else []
