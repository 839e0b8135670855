"""The PRM's section of the report: whether its scores can be trusted, for people who look before they read."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ray_jobs.pages.charts import reliability_diagram

Quality = Mapping[str, Any]
CANARY_LIMIT = 0.3
"""Junk decisions must score below it."""

PRM_STYLE = """
.track.chance { background: linear-gradient(var(--soft), var(--soft)) center / 1px 100% no-repeat var(--raised); }
.prm-point, .prm-tick { position: absolute; transform: translateX(-50%); }
.prm-point { top: 6px; width: 10px; height: 10px; border-radius: 50%; background: var(--after); }
.prm-tick { top: 1px; width: 4px; height: 20px; border-radius: 2px; }
.prm-tick.constant, .key.constant { background: var(--untouched); }
.prm-tick.length, .key.length { background: var(--before); }
.prm-diagram { max-width: 400px; } svg.prm-diagram text, svg.prm-diagram .note { font-size: 12px; }
.prm-diagram .diagonal { stroke: var(--soft); stroke-dasharray: 4 4; fill: none; }
"""
"""For the page's style sheet, after viewer/static/palette.css, whose variables it uses."""

_UNDEFINED = "not defined"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One number of the forest. `low` and `high` end its scale; half-way lies chance, or the baseline itself."""

    key: str
    label: str
    low: float = 0.0
    high: float = 1.0
    chance: bool = True


_ROWS = (
    _Row(key="r2_over_constant", label="R² over the constant", low=-1.0),
    _Row(key="r2_over_length", label="R² over length and action", low=-1.0),
    _Row(key="spearman_overall", label="rank correlation, all steps", low=-1.0),
    _Row(key="spearman_within_group", label="rank correlation, sibling steps", low=-1.0),
    _Row(key="pairwise_accuracy_within_group", label="sibling pairs in the right order"),
    _Row(key="auroc_outcome", label="AUROC for a right answer"),
)
_BASELINES = ("constant", "length")
_LEGEND = {
    "s0": "the PRM, with its 95% interval by task",
    "constant": "baseline: always the mean label",
    "length": "baseline: length and action alone",
}


def render_prm_section(quality: Quality) -> str:
    """What `reward.prm_quality.quality_report` found, as an HTML fragment without its heading. It needs PRM_STYLE.

    `quality["canaries"]`, where present, maps a junk decision's name to its score, or lists {name, score}.
    What is missing, None or not a finite number is shown as "not defined".
    """
    return (
        f"<p>{_sizes(quality)}</p>{_forest(quality)}<h3>Are the scores calibrated?</h3>{_diagram(quality)}"
        f"{_calibration(quality)}<h3>Does it pick better attempts?</h3>{_picks(quality)}{_habits(quality)}"
        f"{_canaries(quality)}"
    )


def _sizes(quality: Quality) -> str:
    keys = ("num_steps", "num_tasks_held_out", "num_invalid_steps")
    steps, tasks, invalid = (_shown(quality.get(key), "{:,.0f}") for key in keys)
    return f"Judged on {steps} steps of held-out tasks (tasks: {tasks}); {invalid} of the steps were malformed."


def _forest(quality: Quality) -> str:
    errors = [_number(quality.get(key)) for key in ("mse", *(f"mse_baseline_{name}" for name in _BASELINES))]
    interval = _interval(quality.get("mse_ci95")) or ()
    top = max((error for error in (*errors, *interval) if error is not None), default=0.0) or 1.0
    rows = (_Row(key="mse", label="mean squared error, less is better", high=1.1 * top, chance=False), *_ROWS)
    bars = "".join(_forest_row(quality, row) for row in rows)
    bars += "".join(_forest_row(found, _action_row(action, found)) for action, found in _by_action(quality))
    legend = "".join(f'<span><span class="key {kind}"></span>{text}</span> ' for kind, text in _LEGEND.items())
    note = "Thin line: chance, or the baseline itself; right of it is better."
    return f'<div class="rates">{bars}</div><p class="legend">{legend}<span>{note}</span></p>'


def like_with_like(quality: Quality) -> str:
    """A sentence on what the AUROC of the outcome does not say, with the numbers that do."""
    found = list(_by_action(quality))
    if not found:
        return ""
    each = "; ".join(f"<code>{escape(action)}</code> {_with_interval(row, 'auroc')}" for action, row in found)
    return (
        f"<p>Like with like, on the held-out tasks: AUROC of right against wrong steps of one action: {each}; 0.5 is "
        "chance. The AUROC for a right answer ranks whole attempts, and may only tell who used tools from who "
        "guessed.</p>"
    )


def _by_action(quality: Quality) -> Iterator[tuple[str, Quality]]:
    yield from (quality.get("auroc_by_action") or {}).items()


def _action_row(action: str, found: Quality) -> _Row:
    counts = (_shown(found.get(key), "{:,.0f}") for key in ("num_right", "num_wrong"))
    return _Row(key="auroc", label=f"AUROC for a right {escape(action)} step ({' right, '.join(counts)} wrong)")


def _forest_row(quality: Quality, row: _Row) -> str:
    value, interval = _number(quality.get(row.key)), _interval(quality.get(f"{row.key}_ci95"))
    baselines = {name: _number(quality.get(f"{row.key}_baseline_{name}")) for name in _BASELINES}
    known = {name: number for name, number in baselines.items() if number is not None}
    marks = "".join(
        f'<span class="prm-tick {name}" style="left:{_percent(row, number):.2f}%"></span>'
        for name, number in known.items()
    )
    if interval:
        left, right = (_percent(row, end) for end in interval)
        marks += f'<span class="whisker" style="left:{left:.2f}%;right:{100 - right:.2f}%"></span>'
    if value is not None:
        marks += f'<span class="prm-point" style="left:{_percent(row, value):.2f}%"></span>'
    notes = [_between(interval), *(f"{name} {number:.3f}" for name, number in known.items())]
    return (
        f'<div class="rate"><span>{row.label}<br><span class="soft">{"; ".join(notes)}</span></span>'
        f'<span class="track{" chance" if row.chance else ""}">{marks}</span><b>{_shown(value)}</b></div>'
    )


def _diagram(quality: Quality) -> str:
    bins = list(_bins(quality))
    return reliability_diagram(bins) if bins else f"<p>Calibration: {_UNDEFINED}.</p>"


def _calibration(quality: Quality) -> str:
    rows = [(f"{count:,.0f}", f"{score:.3f}", f"{label:.3f}") for count, score, label in _bins(quality)]
    error, bias = _with_interval(quality, "ece"), _with_interval(quality, "bias", "{:+.3f}")
    table = _table(("steps", "mean score", "mean label"), rows)
    details = f"<details><summary>The dots as numbers</summary>{table}</details>" if rows else ""
    return f"<p>Calibration error {error}; bias {bias}. On the dashed line a score means what it says.</p>{details}"


def _picks(quality: Quality) -> str:
    lines = ""
    for n, row in (quality.get("best_of_n") or {}).items():
        prm, random, oracle = (_shown(row.get(name), "{:.1%}") for name in ("prm", "random", "oracle"))
        gain, share = _with_interval(row, "gain", "{:+.1%}"), _with_interval(row, "share_of_headroom", "{:.0%}")
        lines += (
            f"<li>Best of {escape(str(n))}: the PRM's pick is right in {prm}, a random one in {random}, the best one "
            f"in {oracle}. Gain {gain}; share of what there was to gain: {share}.</li>"
        )
    return f"<ul>{lines}</ul>" if lines else f"<p>Best of n: {_UNDEFINED}.</p>"


def _habits(quality: Quality) -> str:
    length, last = _with_interval(quality, "spearman_score_length"), _with_interval(quality, "share_min_on_last")
    return f'<p class="soft">Rank correlation of score and length: {length}. Lowest score on the last step: {last}.</p>'


def _canaries(quality: Quality) -> str:
    canaries = quality.get("canaries")
    if not canaries:
        return ""
    pairs = canaries.items() if isinstance(canaries, Mapping) else ((one["name"], one.get("score")) for one in canaries)
    rows = []
    for name, score in pairs:
        number = _number(score)
        answer = _UNDEFINED if number is None else "ok" if number < CANARY_LIMIT else "not ok"
        rows.append((str(name), _shown(score), f"below {CANARY_LIMIT:g}", answer))
    return f"<h3>Junk that must score low</h3>{_table(('decision', 'score', 'limit', ''), rows)}"


def _bins(quality: Quality) -> Iterator[tuple[float, float, float]]:
    for row in quality.get("reliability") or ():
        count, score, label = (_number(row.get(key)) for key in ("count", "mean_pred", "mean_label"))
        if count is not None and score is not None and label is not None:
            yield count, score, label


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ""
    for tag, (first, *others) in [("th", header), *(("td", row) for row in rows)]:
        cells = "".join(f'<{tag} class="num">{escape(cell)}</{tag}>' for cell in others)
        lines += f"<tr><{tag}>{escape(first)}</{tag}>{cells}</tr>"
    return f'<div class="scroll"><table>{lines}</table></div>'


def _number(value: object) -> float | None:
    """Nothing else than a finite number gets onto the page as one."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _interval(value: object) -> tuple[float, float] | None:
    low, high = map(_number, value) if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    return (low, high) if low is not None and high is not None else None


def _percent(row: _Row, value: float) -> float:
    return 100 * min(max((value - row.low) / (row.high - row.low), 0.0), 1.0)


def _shown(value: object, form: str = "{:.3f}") -> str:
    number = _number(value)
    return _UNDEFINED if number is None else form.format(number)


def _between(interval: tuple[float, float] | None, form: str = "{:.3f}") -> str:
    return f"95% interval {f'{form} to {form}'.format(*interval) if interval else _UNDEFINED}"


def _with_interval(numbers: Quality, key: str, form: str = "{:.3f}") -> str:
    if _number(numbers.get(key)) is None:
        return _UNDEFINED
    return f"{_shown(numbers[key], form)} ({_between(_interval(numbers.get(f'{key}_ci95')), form)})"
