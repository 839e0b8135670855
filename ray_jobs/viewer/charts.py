"""Charts as inline SVG: they need no library and no network to be looked at. They escape the words that they draw."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 14, 30
_SIDE, _EDGE = 320, 36
_MAX_DOTS = 40
_NUM_COLOURS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rate with its interval, all between 0 and 1. `kind` is its colour in style.css."""

    label: str
    note: str
    rate: float
    interval: tuple[float, float]
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A rate that was measured at one step, with its interval, all between 0 and 1."""

    label: str
    step: float
    rate: float
    interval: tuple[float, float]
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines over train steps `xs`, y from 0 to `top`; a line goes past an x at which it is not finite. `intervals` of a
    line, low and high at each x, are whiskers. `marks` are diamonds with whiskers; with `share` the labels of y are
    percent."""

    title: str
    xs: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    top: float
    marks: Sequence[Mark] = ()
    share: bool = False
    intervals: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Class of the key in style.css, and what it stands for."""
        lines = [(_colour(index), name) for index, name in enumerate(self.lines)]
        return lines + [(f"mark {mark.kind}", f"{mark.label}: {100 * mark.rate:.1f}%") for mark in self.marks]

    @property
    def svg(self) -> str:
        """The drawing; `xs` is not empty."""
        parts = "".join((*self._grid(), *self._drawn_lines(), *self._drawn_marks()))
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">{parts}</svg>'

    def _ends(self) -> tuple[float, float]:
        ends = [self.xs[0], self.xs[-1], *(mark.step for mark in self.marks)]
        return min(ends), max(ends)

    def _across(self, step: float) -> float:
        first, last = self._ends()
        return _LEFT + (step - first) / max(last - first, 1e-9) * (WIDTH - _LEFT - _RIGHT)

    def _up(self, y: float) -> float:
        return _TOP + (1 - min(y / self.top, 1)) * (HEIGHT - _TOP - _BOTTOM)

    def _grid(self) -> Iterator[str]:
        for tick in range(5):
            value = self.top * (1 - tick / 4)
            label = f"{100 * value:g}%" if self.share else f"{value:g}"
            y = self._up(value)
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}h{WIDTH - _LEFT - _RIGHT}"/>'
            yield f'<text class="note" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        for index, step in enumerate(_ticks(*self._ends())):
            name, x = f"step {step}" if index == 0 else str(step), self._across(step)
            yield f'<text class="note" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{name}</text>'

    def _drawn_lines(self) -> Iterator[str]:
        for index, (name, ys) in enumerate(self.lines.items()):
            there = [at for at, y in enumerate(ys) if math.isfinite(y)]
            places = [(self._across(self.xs[at]), self._up(ys[at])) for at in there]
            points, colour = " ".join(f"{x:.1f},{y:.1f}" for x, y in places), _colour(index)
            for at in there if name in self.intervals else ():
                x, (low, high) = self._across(self.xs[at]), map(self._up, self.intervals[name][at])
                yield f'<path class="reach {colour}" d="M{x:.1f} {high:.1f}V{low:.1f}"/>'
            yield f'<polyline class="line {colour}" points="{points}"><title>{escape(name)}</title></polyline>'
            # A run of one step has no line, only its point.
            for x, y in places if len(places) <= _MAX_DOTS else ():
                yield f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'

    def _drawn_marks(self) -> Iterator[str]:
        for mark in self.marks:
            x, y, (low, high) = self._across(mark.step), self._up(mark.rate), map(self._up, mark.interval)
            title = escape(f"{mark.label}: {100 * mark.rate:.1f}%")
            yield f'<path class="reach {mark.kind}" d="M{x:.1f} {high:.1f}V{low:.1f}"/>'
            diamond = f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z"
            yield f'<path class="mark {mark.kind}" d="{diamond}"><title>{title}</title></path>'


def _colour(index: int) -> str:
    """The class in style.css of a chart's line."""
    return f"s{index % _NUM_COLOURS}"


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
