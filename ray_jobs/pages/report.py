"""The report of a run: one page that stands alone, for people who look before they read."""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from envs.sandbox import SandboxState
from ray_jobs.pages.charts import Bar, Mark, bar_chart, line_chart
from ray_jobs.pages.prm import like_with_like, render_prm_section
from ray_jobs.pages.render import page_of, percent, shown, table
from ray_jobs.pages.trajectory_cards import scored_cards, trajectory_cards
from ray_jobs.run.summary import held_out_rates
from reward.paired import wilson_interval
from rollout.records import read_records
from rollout.store.disk import write_whole

Record = Mapping[str, Any]


def learning_curve(steps: Sequence[Record], summary: Mapping[str, Any]) -> str:
    """The solve rate while sampling, and the held-out rates before the first and after the last train step."""
    marks = [
        Mark(
            label=f"held out, {one.policy} RL",
            step=one.step,
            rate=one.rate,
            low=one.low,
            high=one.high,
            kind=one.policy,
        )
        for one in held_out_rates(summary)
    ]
    sampled = {"rollout/solve_rate": "while sampling, all drawn groups"}
    note = (
        "Line: attempts at training tasks, sampled. Diamonds: held-out tasks, answered greedily, 95% Wilson intervals."
    )
    return _chart(steps, sampled, "Tasks solved, over train steps", marks=marks, share=True) + (
        f'<p class="soft">{note}</p>' if steps else ""
    )


def training_curves(steps: Sequence[Record]) -> str:
    """Signal, staleness and speed over train steps."""
    signal = {"rollout/groups_kept_share": "share of groups with signal"}
    staleness = {"policy/staleness_max": "train steps between sampling and training"}
    times = {"learner/step_s": "the learner computed", "learner/wait_s": "the learner waited for rollouts"}
    return (
        _chart(steps, signal, "Groups with some right and some wrong attempts", share=True)
        + _chart(steps, staleness, "Age of the oldest token in a batch")
        + _chart(steps, times, "Seconds per train step")
    )


def _chart(
    steps: Sequence[Record], names: Mapping[str, str], title: str, *, marks: Sequence[Mark] = (), share: bool = False
) -> str:
    """Steps where a value is missing or not finite are left out."""
    rows = [row for row in steps if all(math.isfinite(row.get(key, math.nan)) for key in names)]
    if not rows:
        return f"<p>Not logged: {escape(title)}.</p>"
    lines = {name: [float(row[key]) for row in rows] for key, name in names.items()}
    # The grid has four rows: multiples of four keep its labels whole.
    top = 1.0 if share else 4.0 * max(1, math.ceil(max(map(max, lines.values())) / 4))
    return line_chart([float(row["step"]) for row in rows], lines, top=top, title=title, marks=marks, share=share)


_PHASES = {"eval_untouched": "untouched model", "eval_before": "cold-started", "eval_after": "after RL"}
_KEY_NUMBERS = {
    "wall_s": "wall time, all phases (s)",
    "train_wall_s": "wall time, RL (s)",
    "num_steps": "train steps",
    "num_trajectories": "trajectories",
    "trajectories_per_s": "trajectories per second",
    "rollout_tokens_per_s": "sampled tokens per second",
    "learner_tokens_per_s": "learner tokens per second (shared prefixes once)",
    "learner_wait_s": "learner waited for rollouts (s)",
    "staleness": "staleness (train steps)",
    "groups": "groups",
    "versions_published": "policy versions published",
    "versions_acked": "policy versions proven: weights read back, canary text scored alike",
    "versions_unmoved": "most versions in a row that the weights read back alone proved",
    "sync_s": "seconds from publication to proof",
    "restarts": "actors replaced",
    "steps_skipped": "train steps skipped by the guard",
    "logprob_gap_version0": "mean |log-prob gap| engine to learner at version 0, choice tokens",
}
_JUDGED_BY = {
    *("solve_rate_untouched", "solve_rate_before", "solve_rate_after", "num_eval_tasks", "num_untouched_tasks"),
    *("solve_rate_gain_ci95", "mcnemar_p", "verdict", "by_dataset", "cold_start", "phases", "bottleneck"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What a run folder says; a file that is not there is empty. `attempts` are by phase, then by task; `scored` is
    the last group that the PRM scored."""

    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    origin: Mapping[str, Any]
    steps: Sequence[Record]
    attempts: Mapping[str, Mapping[str, Record]]
    scored: Sequence[Record]


def write_report(run_dir: Path) -> Path:
    """Render `report.html` from the files of the run folder; what is missing is named on the page."""
    run = _read_run(run_dir)
    sections = {
        "Before and after": _bars(run.summary) + _by_dataset(run.summary) + _endings(run.attempts),
        "Trajectories to read": trajectory_cards(run.attempts),
        "The process reward model": _prm(run),
        "Training": training_curves(run.steps) + _limit(run.summary),
        "Numbers": _folded("All numbers of this run", _numbers(run.summary)),
    }
    sections = {title: content for title, content in sections.items() if content}
    opening = (
        _headline(run.summary) + _contents(sections, run_dir) + learning_curve(run.steps, run.summary) + _caveats(run)
    )
    body = "".join(
        f'<section id="{_anchor(title)}"><h2>{title}</h2>{content}</section>' for title, content in sections.items()
    )
    page = page_of(f"{run_dir.name}: report", f"{opening}{body}{_footer(run)}")
    path = run_dir / "report.html"
    write_whole(path, page.encode())
    return path


def write_prm_page(folder: Path, quality: Mapping[str, Any]) -> Path:
    """`prm_quality.html`: the quality of a PRM that was trained by itself, outside of a run."""
    path = folder / "prm_quality.html"
    path.write_text(
        page_of("PRM quality", f"<h1>How good is the PRM?</h1>{render_prm_section(quality)}"), encoding="utf-8"
    )
    return path


def _contents(titles: Iterable[str], run_dir: Path) -> str:
    links = "".join(f'<a href="#{_anchor(title)}">{title}</a> ' for title in titles)
    command = escape(f"agentflow view {shlex.quote(str(run_dir))}")
    return (
        f'<nav aria-label="Contents">{links}</nav>'
        f'<p class="soft">Every trajectory, and why each step got its advantage: <code>{command}</code></p>'
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>" if content else ""


def _headline(summary: Mapping[str, Any]) -> str:
    if not summary:
        return '<h1>A run that did not finish</h1><p class="verdict unsure">There is no summary to judge by.</p>'
    before, after, p = (summary.get(key) for key in ("solve_rate_before", "solve_rate_after", "mcnemar_p"))
    if before is None or after is None or p is None:
        answer, kind = "That was not measured.", "unsure"
    elif p >= 0.05:
        answer, kind = "This run does not show it.", "unsure"
    else:
        answer, kind = ("Yes.", "better") if after > before else ("No, it made it worse.", "unsure worse")
    verdict = str(summary.get("verdict") or "Its verdict is missing")
    gain = None if before is None or after is None else 100 * (after - before)
    hero = "" if gain is None else f'<p class="hero">{gain:+.1f} points</p>'
    return (
        f"<h1>Did reinforcement learning make the planner better?</h1>{hero}"
        f'<p class="verdict {kind}"><b>{answer}</b> On {shown(summary.get("num_eval_tasks"))} held-out tasks: '
        f"<b>{percent(before)}</b> solved after the cold start, <b>{percent(after)}</b> after RL. "
        f"{escape(verdict[0].upper() + verdict[1:])}.</p>"
    )


def _caveats(run: _Run) -> str:
    """What the headline does not say and its reader should know, taken from this run's own numbers."""
    found = _handicap(run)
    untouched = run.attempts["eval_untouched"].values()
    silent = sum(record["answer"] is None for record in untouched)
    if silent * 2 > len(untouched):
        found.append(
            f"{silent} of the untouched model's {len(untouched)} attempts ended without an answer: its rate tells "
            "that it does not know the format of an action, and little about what it knows."
        )
    for name, row in run.summary.get("by_dataset", {}).items():
        if row["after"] == 0:
            found.append(f"Of the {row['num']} {name} tasks, none was solved after RL: this was not learned.")
        elif row["after"] < row["before"]:
            found.append(f"On {name}, fewer tasks were solved after RL than before.")
        if not row.get("trained", True) and row.get("mcnemar_p", 0.0) >= 0.05:
            found.append(f"On {name}, which was never trained on, RL made no difference that this run shows.")
    if run.summary:
        seed = shown(run.summary.get("seed"))
        found.append(f"This is one run (seed {seed}). The interval covers the choice of tasks, not other seeds.")
    items = "".join(f"<li>{escape(text)}</li>" for text in found)
    return f'<div class="card caveats"><b>Read it with this in mind</b><ul>{items}</ul></div>' if items else ""


def _handicap(run: _Run) -> list[str]:
    start = run.summary.get("cold_start", {})
    count, right = start.get("num_demonstrations"), start.get("num_right")
    if not count or right is None:
        return []
    said = [
        f"The cold start imitated {count} scripted demonstrations on training tasks, {count - right} of them "
        f"({percent(1 - right / count)}) wrong on purpose, so that there was something left to learn. "
        "The gain is over this handicapped policy."
    ]
    if run.steps and run.steps[0]["step"] == 1 and "rollout/solve_rate" in run.steps[0]:
        # Before the first train step there is only version 0, so these trajectories are the cold-started policy's.
        temperature = shown(run.config.get("rollout", {}).get("temperature"))
        said.append(
            "Evaluation is greedy, which brings out the plan that was shown most often. Sampled with temperature "
            f"{temperature}, the cold-started policy was right in {percent(run.steps[0]['rollout/solve_rate'])} of "
            "its attempts at training tasks before the first train step."
        )
    return said


def _bars(summary: Mapping[str, Any]) -> str:
    bars, of = [], summary.get("num_eval_tasks")
    for phase, label in _PHASES.items():
        kind = phase.removeprefix("eval_")
        rate, count = (
            summary.get(f"solve_rate_{kind}"),
            summary.get("num_untouched_tasks") if kind == "untouched" else of,
        )
        if rate is not None and count:
            low, high = wilson_interval(round(rate * count), count)
            note = f"{count} tasks" if count == of else f"the first {count} tasks"
            bars.append(Bar(label=label, note=note, rate=rate, low=low, high=high, kind=kind))
    note = "Greedy, on the same held-out tasks; a failed trajectory is a wrong one. Whiskers: 95% Wilson intervals."
    return (bar_chart(bars) if bars else "<p>No solve rate was measured.</p>") + f'<p class="soft">{note}</p>'


def _by_dataset(summary: Mapping[str, Any]) -> str:
    rows = []
    for name, row in summary.get("by_dataset", {}).items():
        label = name if row.get("trained", True) else f"{name} (never trained on)"
        low, high = wilson_interval(round(row["after"] * row["num"]), row["num"])
        rates = (percent(row["before"]), percent(row["after"]), f"{100 * low:.1f} to {100 * high:.1f}%")
        rows.append((label, str(row["num"]), *rates, f"{row['mcnemar_p']:.2g}" if "mcnemar_p" in row else ""))
    return table(("data set", "tasks", "cold-started", "after RL", "95% interval after RL", "exact McNemar p"), rows)


def _endings(attempts: Mapping[str, Mapping[str, Record]]) -> str:
    """A wrong answer and no answer at all have different causes."""
    rows = []
    for phase, label in _PHASES.items():
        records = list(attempts[phase].values())
        if not records:
            continue
        right = sum(record["reward"] == 1 for record in records)
        silent = sum(record["answer"] is None for record in records)
        turns = [turn for record in records for turn in record["turns"] if turn["role"] == "planner"]
        failed = sum(turn["tool_error"] is not None for turn in turns)
        counts = (len(records), right, len(records) - right - silent, silent, failed)
        rows.append((label, *map(str, counts), f"{len(turns) / len(records):.1f}"))
    header = ("policy", "tasks", "right", "wrong answer", "no answer", "failed tool calls", "turns per task")
    return table(header, rows)


def _limit(summary: Mapping[str, Any]) -> str:
    verdict = summary.get("bottleneck")
    return (
        f'<p class="soft">Speed: {escape(verdict["text"])}. To go on: {escape(verdict["hint"])}.</p>' if verdict else ""
    )


def _numbers(summary: Mapping[str, Any]) -> str:
    rows = [(label, shown(summary.get(key))) for key, label in _KEY_NUMBERS.items()]
    rows += [(f"phase: {name} (s)", shown(seconds)) for name, seconds in summary.get("phases", {}).items()]
    missing = sorted({*_JUDGED_BY, *_KEY_NUMBERS} - set(summary))
    note = f'<p class="soft">Missing from summary.json: {", ".join(missing)}.</p>' if missing else ""
    return table(("", "value"), rows) + note


def _footer(run: _Run) -> str:
    keys = ("command", "seed", "git_commit", "started", "cpu", "cores", "memory_gib", "platform", "python", "versions")
    said = {key: escape(shown(run.origin.get(key))) for key in keys}
    dirty = " with uncommitted changes" if run.origin.get("git_dirty") else ""
    config = escape(json.dumps(run.config, indent=2, ensure_ascii=False))
    return (
        f"<footer><h2>How to get these numbers again</h2><p><code>{said['command']}</code></p>"
        f"<p>Seed {said['seed']}, commit {said['git_commit']}{dirty}, started {said['started']}.<br>"
        f"{said['cpu']}, {said['cores']} cores, {said['memory_gib']} GiB, {said['platform']}.<br>"
        f"python {said['python']}, {said['versions']}{_walls(run.origin)}</p>"
        "<details><summary>The configuration with all its defaults</summary>"
        f'<div class="scroll"><pre>{config}</pre></div></details></footer>'
    )


def _walls(origin: Mapping[str, Any]) -> str:
    """What stood around the code that the planner wrote; nothing for a run without the code tool."""
    sandbox = origin.get("sandbox")
    return f"<br>code sandbox: {escape(str(SandboxState(**sandbox)))}" if sandbox else ""


def _prm(run: _Run) -> str:
    """The PRM's quality, what the alarms said while it was in the loop, and a trajectory with its scores."""
    quality = run.summary.get("prm")
    if not quality:
        return ""
    alarms = run.summary.get("alarms", [])
    said = "".join(f"<li>Step {alarm['step']}: {escape(alarm['message'])}.</li>" for alarm in alarms)
    weight = shown(run.summary.get("prm_weight_at_end"))
    count = "1 alarm" if len(alarms) == 1 else f"{len(alarms)} alarms"
    watched = f"<p>{count} in training; the PRM's weight at the end was {weight}.</p>"
    cards = (
        f"<h3>What it said in training</h3>{like_with_like(quality)}{scored_cards(run.scored)}" if run.scored else ""
    )
    statistics = _folded("Its quality on held-out tasks, in numbers", render_prm_section(quality))
    return watched + (f"<ul>{said}</ul>" if said else "") + cards + statistics


def _read_run(run_dir: Path) -> _Run:
    paths = {path.name: path for path in run_dir.iterdir()}
    summary, config, origin = (
        json.loads(paths[name].read_text(encoding="utf-8")) if name in paths else {}
        for name in ("summary.json", "config.json", "provenance.json")
    )
    logs = ("metrics.jsonl", "trajectories.jsonl")
    rows, records = (read_records(paths[name]) if name in paths else () for name in logs)
    attempts: dict[str, dict[str, Record]] = {phase: {} for phase in _PHASES}
    # One at a time: the trajectories of training, of which the page shows none, can be very many.
    scored: list[Record] = []
    for record in records:
        if "prm_scores" in record:
            scored = [*(one for one in scored if one["group_id"] == record["group_id"]), record]
        if record["phase"] in attempts:
            attempts[record["phase"]][record["task_id"]] = record
    steps = [row for row in rows if "policy/loss" in row]
    return _Run(summary=summary, config=config, origin=origin, steps=steps, attempts=attempts, scored=scored)
