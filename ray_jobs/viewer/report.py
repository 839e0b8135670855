"""The report of a run, one page that stands alone, for people who look before they read; and that of a PRM alone."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from envs.datasets.families import FAMILIES
from envs.sandbox import SandboxState
from ray_jobs.run.summary import POLICIES, held_out_rates, rates_by_step
from ray_jobs.statistics import wilson_interval
from ray_jobs.viewer.charts import Bar, LineChart, Mark, reliability_diagram
from ray_jobs.viewer.render import finite, finite_pair, write_page
from reward.prm.alarms import CANARY_LIMIT
from rollout.codec import Record, flat_record, read_trajectories
from rollout.filters import SOLVED
from rollout.records import read_records
from rollout.types import Trajectory, is_answer

Row = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What a run folder says; a file that is not there is empty. `attempts` are by phase, then by task; `scored` is
    the last group that the PRM scored; `held_out` are the rows of the evaluations while training."""

    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    steps: Sequence[Row]
    held_out: Sequence[Row]
    attempts: Mapping[str, Mapping[str, Record]]
    scored: Sequence[Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endings:
    """How the attempts of a policy ended: a wrong answer and no answer at all have different causes."""

    policy: str
    tasks: int
    right: int
    silent: int
    unscored: int
    failed_calls: int
    turns: float


def write_report(run_dir: Path) -> Path:
    """Render `report.html` from the files of the run folder; what is missing is named on the page. Raises OSError."""
    run = _read_run(run_dir)
    summary, sandbox = run.summary, run.provenance.get("sandbox")
    answer, kind = _answer(summary)
    return write_page(
        run_dir / "report.html",
        "report",
        name=run_dir.name,
        folder=shlex.quote(str(run_dir)),
        run=run,
        summary=summary,
        answer=answer,
        kind=kind,
        chart=_chart,
        families=_families(run.steps, "mix"),
        solved=_families(run.steps, "solved"),
        marks=_marks(summary),
        held_out=_held_out_charts(run.held_out, _marks(summary)),
        bars=list(_bars(summary)),
        intervals={
            name: wilson_interval(round(row["after"] * row["num"]), row["num"])
            for name, row in summary.get("by_dataset", {}).items()
        },
        endings=[_endings(phase, list(found.values())) for phase, found in run.attempts.items() if found],
        turned=turned_tasks(run.attempts["eval_before"], run.attempts["eval_after"]),
        pair=scored_pair(run.scored),
        prm=prm_quality(summary["prm"]) if summary.get("prm") else None,
        sandbox=SandboxState(**sandbox) if sandbox else None,
        config=json.dumps(run.config, indent=2, ensure_ascii=False),
    )


def _answer(summary: Mapping[str, Any]) -> tuple[str, str]:
    """The answer to whether RL made the planner better, and its kind in style.css."""
    before, after, p = (summary.get(key) for key in ("solve_rate_before", "solve_rate_after", "mcnemar_p"))
    if before is None or after is None or p is None:
        return "That was not measured.", "unsure"
    if p >= 0.05:
        return "This run does not show it.", "unsure"
    return ("Yes.", "better") if after > before else ("No, it made it worse.", "unsure worse")


def _marks(summary: Mapping[str, Any]) -> list[Mark]:
    """The held-out rates before the first and after the last train step."""
    return [
        Mark(label=f"held out, {at.policy} RL", step=step, rate=at.rate, interval=(at.low, at.high), kind=at.policy)
        for step, at in rates_by_step(summary)
    ]


def _held_out_charts(rows: Sequence[Row], marks: Sequence[Mark]) -> list[LineChart]:
    """The evaluations while training: over all their tasks, and data set by data set where there are several."""
    rate = "held_out/solve_rate"
    whole = {rate: "some held-out tasks, greedily"}
    families = {key: key.removeprefix(f"{rate}/") for row in rows for key in row if key.startswith(f"{rate}/")}
    charts = [_chart(rows, "Held-out tasks solved while training", whole, marks=marks, share=True)] if rows else []
    return charts + ([_chart(rows, "The same by data set", families, share=True)] if families else [])


def _chart(
    steps: Sequence[Row], title: str, names: Mapping[str, str], *, marks: Sequence[Mark] = (), share: bool = False
) -> LineChart:
    """Metrics by what their lines are called, with their intervals where they have some. Steps where no value is finite
    are left out."""
    rows = [row for row in steps if any(math.isfinite(row.get(key, math.nan)) for key in names)]
    lines = {name: [float(row.get(key, math.nan)) for row in rows] for key, name in names.items()}
    # The grid has four rows: multiples of four keep its labels whole.
    highest = max((y for ys in lines.values() for y in ys if math.isfinite(y)), default=0.0)
    top = 1.0 if share else 4.0 * max(1, math.ceil(highest / 4))
    xs = [float(row["step"]) for row in rows]
    intervals = {
        name: [_interval(row, key) for row in rows] for key, name in names.items() if key.startswith("held_out/")
    }
    return LineChart(title=title, xs=xs, lines=lines, top=top, marks=marks, share=share, intervals=intervals)


def _interval(row: Row, rate: str) -> tuple[float, float]:
    """That of a held-out rate."""
    low, high = (row.get(rate.replace("solve_rate", end, 1), math.nan) for end in ("low", "high"))
    return low, high


def _families(steps: Sequence[Row], kind: str) -> dict[str, str]:
    """The metrics of this kind of the generated families that were drawn from, and their names; none where it was one
    alone."""
    found = {f"{kind}/{family}": family for family in FAMILIES if any(f"{kind}/{family}" in row for row in steps)}
    return found if len(found) > 1 else {}


def _bars(summary: Mapping[str, Any]) -> Iterator[Bar]:
    of = summary.get("num_eval_tasks")
    for one in held_out_rates(summary):
        note = f"{one.num_tasks} tasks" if one.num_tasks == of else f"{one.num_tasks} of these tasks"
        label, interval = POLICIES[f"eval_{one.policy}"], (one.low, one.high)
        yield Bar(label=label, note=note, rate=one.rate, interval=interval, kind=one.policy)


def _endings(phase: str, attempts: Sequence[Record]) -> _Endings:
    turns = [turn for record in attempts for turn in record["turns"] if turn["role"] == "planner"]
    scored = [record for record in attempts if record["reward"] is not None]
    return _Endings(
        policy=POLICIES[phase],
        tasks=len(attempts),
        right=sum(record["reward"] == SOLVED for record in attempts),
        silent=sum(not is_answer(record["answer"]) for record in scored),
        unscored=len(attempts) - len(scored),
        failed_calls=sum(turn["tool_error"] is not None for turn in turns),
        turns=len(turns) / len(attempts),
    )


def _read_run(run_dir: Path) -> _Run:
    paths = {path.name: path for path in run_dir.iterdir()}
    summary, config, provenance = (
        json.loads(paths[name].read_text(encoding="utf-8")) if name in paths else {}
        for name in ("summary.json", "config.json", "provenance.json")
    )
    rows = list(read_records(paths["metrics.jsonl"])) if "metrics.jsonl" in paths else []
    attempts: dict[str, dict[str, Record]] = {phase: {} for phase in POLICIES}
    # Read one at a time: a run may have very many trained trajectories, of which only one group is shown.
    scored: list[Trajectory] = []
    for trajectory in read_trajectories(paths["trajectories.jsonl"]) if "trajectories.jsonl" in paths else ():
        if trajectory.prm_digest is not None:
            scored = [*(one for one in scored if one.group_id == trajectory.group_id), trajectory]
        if trajectory.phase in attempts:
            attempts[trajectory.phase][trajectory.task.id] = flat_record(trajectory)
    return _Run(
        summary=summary,
        config=config,
        provenance=provenance,
        steps=[row for row in rows if "policy/loss" in row],
        held_out=[row for row in rows if "held_out/solve_rate" in row],
        attempts=attempts,
        scored=list(map(flat_record, scored)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedTasks:
    """How many tasks were attempted after RL, numbers of them by what RL changed, and the first of each kind by title:
    one that RL turned from wrong to right, both ways, and one that the trained policy still fails."""

    attempted: int
    gained: int
    lost: int
    failed: int
    cards: Mapping[str, Record]


def turned_tasks(before: Mapping[str, Record], after: Mapping[str, Record]) -> TurnedTasks:
    """`before` and `after` are the attempts by task. What could not be scored is neither solved nor wrong."""
    gained = [id for id, one in after.items() if one["reward"] == SOLVED and _is_wrong(before.get(id, one))]
    failed = [id for id, one in after.items() if _is_wrong(one)]
    lost = sum(before[id]["reward"] == SOLVED for id in failed if id in before)
    cards = {"Before RL": before[gained[0]], "The same task after RL": after[gained[0]]} if gained else {}
    if failed:
        cards["A task the trained policy still fails"] = after[failed[0]]
    return TurnedTasks(attempted=len(after), gained=len(gained), lost=lost, failed=len(failed), cards=cards)


def _is_wrong(attempt: Record) -> bool:
    return attempt["reward"] is not None and attempt["reward"] != SOLVED


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    """A right and a wrong attempt of one group, by title, or one attempt where the group has no pair.

    `gaps` are the differences of score, right less wrong, of all pairs that part at steps of one action; `gap` is that
    of the pair shown, None where there is no such pair. `fork` counts the steps that both share.
    """

    cards: Mapping[str, Record]
    gaps: Sequence[float] = ()
    gap: float | None = None
    fork: int = 0


def scored_pair(group: Sequence[Record]) -> ScoredPair:
    """Of the pairs that part at steps of one action, the middle one by its gap; else the first pair."""
    right = [one for one in group if one["outcome"] == SOLVED]
    wrong = [one for one in group if one["outcome"] not in (SOLVED, None)]
    if not right or not wrong:
        return ScoredPair(cards={"An attempt of the group": group[0]} if group else {})
    pairs = [(one, other) for one in right for other in wrong]
    found = [(gap, pair) for pair in pairs if (gap := _gap(*pair)) is not None]
    found.sort(key=lambda one: one[0])
    gap, pair = found[(len(found) - 1) // 2] if found else (None, pairs[0])
    cards = {"A right attempt": pair[0], "A wrong sibling of the same group": pair[1]}
    return ScoredPair(cards=cards, gaps=[gap for gap, _ in found], gap=gap, fork=_fork(*pair))


def _gap(right: Record, wrong: Record) -> float | None:
    """The right attempt's score less the wrong one's where they part; None where they do not do the same with another
    input there, or a score is missing."""
    steps, fork = (_decisions(right), _decisions(wrong)), _fork(right, wrong)
    if fork >= min(map(len, steps)):
        return None
    (action, said, _), (other_action, other_said, _) = (side[fork] for side in steps)
    score, other_score = (one["prm_scores"][fork] for one in (right, wrong))
    if action is None or action != other_action or said == other_said or score is None or other_score is None:
        return None
    return score - other_score


def _fork(one: Record, other: Record) -> int:
    """How many steps they share from the beginning, results included."""
    pairs = list(zip(_decisions(one), _decisions(other), strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


Decision: TypeAlias = tuple[str | None, str, str | None]


def _decisions(record: Record) -> list[Decision]:
    """Action, input and result of each planner step; a malformed step is its text."""
    return [
        (turn["action"], turn["action_input"] or turn["text"], turn["result"])
        for turn in record["turns"]
        if turn["role"] == "planner"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrmQuality:
    """What `reward.prm.quality.evaluate_prm` found; what in it is missing, None or no finite number is shown as "not
    defined". `bins` are (count, mean score, mean label); `top_error` ends the scale of the squared errors."""

    found: Mapping[str, Any]
    bins: Sequence[tuple[float, float, float]]
    diagram: str
    top_error: float
    canary_limit: float = CANARY_LIMIT
    """Junk decisions must score below it."""


def prm_quality(found: Mapping[str, Any]) -> PrmQuality:
    bins = list(_bins(found))
    errors = [finite(found.get(key)) for key in ("mse", "mse_baseline_constant", "mse_baseline_length")]
    errors += finite_pair(found.get("mse_ci95")) or ()
    top = max((error for error in errors if error is not None), default=0.0) or 1.0
    diagram = reliability_diagram(bins) if bins else ""
    return PrmQuality(found=found, bins=bins, diagram=diagram, top_error=1.1 * top)


def write_prm_page(folder: Path, found: Mapping[str, Any]) -> Path:
    """`prm_quality.html`: the quality of a PRM that was trained by itself, outside of a run. Raises OSError."""
    return write_page(folder / "prm_quality.html", "prm_page", prm=prm_quality(found))


def _bins(found: Mapping[str, Any]) -> Iterator[tuple[float, float, float]]:
    for row in found.get("reliability") or ():
        count, score, label = (finite(row.get(key)) for key in ("count", "mean_pred", "mean_label"))
        if count is not None and score is not None and label is not None:
            yield count, score, label
