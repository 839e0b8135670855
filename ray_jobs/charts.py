"""Charts as inline SVG: they need no library and no network to be looked at."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 14, 30
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


def line_chart(xs: Sequence[float], lines: Mapping[str, Sequence[float]], *, top: float, title: str) -> str:
    """Lines over train steps, y from 0 to `top`."""
    if not xs:
        return "<p>No train steps were logged.</p>"
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    first, span = xs[0], max(xs[-1] - xs[0], 1e-9)

    def place(x: float, y: float) -> str:
        return f"{_LEFT + (x - first) / span * width:.1f},{_TOP + (1 - min(y / top, 1)) * height:.1f}"

    parts = []
    for tick in range(5):
        y = _TOP + tick / 4 * height
        value = top * (1 - tick / 4)
        parts.append(
            f'<path class="grid" d="M{_LEFT} {y:.1f}h{width}"/>'
            f'<text class="note" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for x in sorted({xs[0], xs[len(xs) // 2], xs[-1]}):
        position = place(x, 0).split(",")[0]
        parts.append(f'<text class="note" x="{position}" y="{HEIGHT - 8}" text-anchor="middle">{x:g}</text>')
    for index, (name, ys) in enumerate(lines.items()):
        points = " ".join(place(x, y) for x, y in zip(xs, ys, strict=True))
        parts.append(f'<polyline class="line s{index}" points="{points}"><title>{escape(name)}</title></polyline>')
        # A run of one step has no line, only its point.
        dots = (place(x, y).split(",") for x, y in zip(xs, ys, strict=True) if len(xs) <= 40)
        parts += [f'<circle class="dot s{index}" cx="{x}" cy="{y}" r="2.6"/>' for x, y in dots]
    keys = (f'<span><span class="key s{index}"></span>{escape(name)}</span> ' for index, name in enumerate(lines))
    return _svg("".join(parts), height=HEIGHT, title=title) + f'<p class="legend">{"".join(keys)}</p>'


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


def _svg(content: str, *, height: float, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">{content}</svg>'
