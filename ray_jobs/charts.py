"""Charts as inline SVG: they need no library and no network to be looked at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 14, 30


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
    """Horizontal bars with interval whiskers."""
    row, left, right = 46, 150, 70
    width = WIDTH - left - right
    parts = []
    for index, bar in enumerate(bars):
        y = 8 + index * row
        low, high = left + bar.low * width, left + bar.high * width
        parts.append(
            f'<text class="label" x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(bar.label)}</text>'
            f'<text class="note" x="{left - 10}" y="{y + 30}" text-anchor="end">{escape(bar.note)}</text>'
            f'<rect class="track" x="{left}" y="{y + 5}" width="{width}" height="20" rx="4"/>'
            f'<rect class="bar {bar.kind}" x="{left}" y="{y + 5}" width="{bar.rate * width:.1f}" height="20" rx="4"/>'
            f'<path class="whisker" d="M{low:.1f} {y + 15}H{high:.1f}M{low:.1f} {y + 10}v10M{high:.1f} {y + 10}v10"/>'
            f'<text class="value" x="{left + width + 10}" y="{y + 20}">{100 * bar.rate:.1f}%</text>'
        )
    return _svg("".join(parts), height=len(bars) * row + 12, title="solve rates with 95% intervals")


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
    for x in (xs[0], xs[len(xs) // 2], xs[-1]):
        position = place(x, 0).split(",")[0]
        parts.append(f'<text class="note" x="{position}" y="{HEIGHT - 8}" text-anchor="middle">{x:g}</text>')
    for index, (name, ys) in enumerate(lines.items()):
        points = " ".join(place(x, y) for x, y in zip(xs, ys, strict=True))
        parts.append(f'<polyline class="line s{index}" points="{points}"><title>{escape(name)}</title></polyline>')
    legend = "".join(f'<span class="key s{index}"></span>{escape(name)} ' for index, name in enumerate(lines))
    return _svg("".join(parts), height=HEIGHT, title=title) + f'<p class="legend">{legend}</p>'


def _svg(content: str, *, height: float, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">{content}</svg>'
