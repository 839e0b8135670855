"""Charts as inline SVG: they need no library and no network to be looked at."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 14, 30
_SIDE, _EDGE = 320, 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One rate with its interval, all between 0 and 1."""

    label: str
    note: str
    rate: float
    low: float
    high: float
    kind: str


def bar_chart(bars: Sequence[Bar]) -> str:
    """Horizontal bars with interval whiskers. Boxes, not SVG: their labels keep their size on a phone."""
    rows = "".join(
        f'<div class="rate"><span>{escape(bar.label)}<br><span class="soft">{escape(bar.note)}</span></span>'
        f'<span class="track"><span class="bar {bar.kind}" style="width:{100 * bar.rate:.2f}%"></span>'
        f'<span class="whisker" style="left:{100 * bar.low:.2f}%;right:{100 * (1 - bar.high):.2f}%"></span></span>'
        f"<b>{100 * bar.rate:.1f}%</b></div>"
        for bar in bars
    )
    return f'<div class="rates">{rows}</div>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A rate that was measured at one step, with its interval, all between 0 and 1."""

    label: str
    step: float
    rate: float
    low: float
    high: float
    kind: str


def line_chart(
    xs: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    top: float,
    title: str,
    marks: Sequence[Mark] = (),
    share: bool = False,
) -> str:
    """Lines over train steps under their title, y from 0 to `top`. `marks` become diamonds with whiskers; with `share`
    the labels of y are percent."""
    if not xs:
        return "<p>No train steps were logged.</p>"
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    ends = [xs[0], xs[-1], *(mark.step for mark in marks)]
    first, last = min(ends), max(ends)

    def across(x: float) -> float:
        return _LEFT + (x - first) / max(last - first, 1e-9) * width

    def up(y: float) -> float:
        return _TOP + (1 - min(y / top, 1)) * height

    parts = []
    for tick in range(5):
        value = top * (1 - tick / 4)
        label = f"{100 * value:g}%" if share else f"{value:g}"
        parts.append(
            f'<path class="grid" d="M{_LEFT} {up(value):.1f}h{width}"/>'
            f'<text class="note" x="{_LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for index, step in enumerate(_ticks(first, last)):
        name = f"step {step}" if index == 0 else str(step)
        parts.append(f'<text class="note" x="{across(step):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{name}</text>')
    for index, (name, ys) in enumerate(lines.items()):
        places = [(across(x), up(y)) for x, y in zip(xs, ys, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line s{index}" points="{points}"><title>{escape(name)}</title></polyline>')
        # A run of one step has no line, only its point.
        parts += [
            f'<circle class="dot s{index}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in places if len(places) <= 40
        ]
    parts += [
        f'<path class="reach {mark.kind}" d="M{across(mark.step):.1f} {up(mark.high):.1f}V{up(mark.low):.1f}"/>'
        f'<path class="mark {mark.kind}" d="M{across(mark.step):.1f} {up(mark.rate) - 7:.1f}l7 7l-7 7l-7 -7z">'
        f"<title>{escape(mark.label)}: {100 * mark.rate:.1f}%</title></path>"
        for mark in marks
    ]
    keys = [(f"s{index}", name) for index, name in enumerate(lines)]
    keys += [(f"mark {mark.kind}", f"{mark.label}: {100 * mark.rate:.1f}%") for mark in marks]
    legend = "".join(f'<span><span class="key {kind}"></span>{escape(name)}</span> ' for kind, name in keys)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f'<figure><figcaption>{escape(title)}</figcaption>{svg}<p class="legend">{legend}</p></figure>'


def _ticks(first: float, last: float) -> range:
    """Whole steps at even distances, eleven at most."""
    strides = (scale * unit for scale in (10**power for power in range(12)) for unit in (1, 2, 5))
    stride = next(stride for stride in strides if (last - first) / stride <= 10)
    return range(math.ceil(first / stride) * stride, math.floor(last) + 1, stride)


def reliability_diagram(bins: Sequence[tuple[float, float, float]]) -> str:
    """Dots of (count, mean score, mean label) beside the diagonal on which both are equal. `bins` is not empty."""
    low, high = min(0.0, *(row[1] for row in bins)), max(1.0, *(row[1] for row in bins))
    size, total = _SIDE - 2 * _EDGE, max(sum(row[0] for row in bins), 1)

    def place(score: float, label: float) -> tuple[float, float]:
        x, y = ((value - low) / (high - low) for value in (score, label))
        return _EDGE + x * size, _SIDE - _EDGE - y * size

    (x0, y0), (x1, y1) = place(low, low), place(high, high)
    parts = [f'<path class="diagonal" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"/>', _score_axes(low, high)]
    for count, score, label in bins:
        x, y = place(score, label)
        parts.append(
            f'<circle class="dot s0" cx="{x:.1f}" cy="{y:.1f}" r="{3 + 8 * math.sqrt(count / total):.1f}">'
            f"<title>{count:.0f} steps scored {score:.2f} on average, labelled {label:.2f}</title></circle>"
        )
    title = "Reliability: mean label over mean score, in bins of equally many steps"
    return (
        f'<svg class="prm-diagram" viewBox="0 0 {_SIDE} {_SIDE}" role="img" aria-label="{title}">{"".join(parts)}</svg>'
    )


def _score_axes(low: float, high: float) -> str:
    start, end = _EDGE, _SIDE - _EDGE
    ends = "".join(
        f'<text class="note" x="{at}" y="{end + 16}" text-anchor="middle">{value:.3g}</text>'
        f'<text class="note" x="{start - 6}" y="{_SIDE - at + 4}" text-anchor="end">{value:.3g}</text>'
        for at, value in ((start, low), (end, high))
    )
    middle = _SIDE // 2
    return (
        f'<path class="grid" d="M{start} {start}V{end}H{end}"/>{ends}'
        f'<text class="note" x="{middle}" y="{end + 28}" text-anchor="middle">what the PRM said</text>'
        f'<text class="note" x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">label</text>'
    )
