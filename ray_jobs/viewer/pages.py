"""HTML pages that stand alone: templates, formats of numbers, and charts as inline SVG."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rollout.files import write_whole
from rollout.types import is_answer

TEMPLATES = Path(__file__).with_name("templates")
STYLES = (Path(__file__).with_name("static") / "palette.css", TEMPLATES / "style.css")
WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 14, 30
_MAX_DOTS = 40
_NUM_COLOURS = 6
# Invisible characters, and those that change the direction of reading.
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def write_page(path: Path, template: str, **values: object) -> Path:
    """Write a page from `templates/TEMPLATE.html.j2` in one piece. Raises OSError."""
    styles = "".join(style.read_text(encoding="utf-8") for style in STYLES)
    page = _ENVIRONMENT.get_template(f"{template}.html.j2").render(values, styles=styles)
    # The text of a model may hold half of a surrogate pair, which UTF-8 cannot encode.
    write_whole(path, page.encode(errors="replace"))
    return path


def shown(value: object) -> str:
    """Format any JSON value as text."""
    if value is None:
        return "missing"
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {shown(part)}" for name, part in value.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def percent(rate: float | None) -> str:
    """Format a rate in [0, 1] with a percent sign."""
    return "not measured" if rate is None else f"{100 * rate:.1f}%"


def hundredths(rate: float | None) -> str:
    """Format a rate in [0, 1] as a number from 0 to 100."""
    return "" if rate is None else f"{100 * rate:.1f}"


def points(rates: Sequence[float], *, signed: bool = False) -> str:
    """Format the ends of an interval as numbers from 0 to 100."""
    return " to ".join(f"{100 * rate:{'+' if signed else ''}.1f}" for rate in rates)


def place(value: float, low: float = 0.0, high: float = 1.0) -> str:
    """Return the position of a value on a track from `low` to `high` in percent, within its ends."""
    return f"{100 * min(max(0.0, (value - low) / (high - low)), 1.0):.2f}"


def seen(text: str) -> str:
    """Replace the hidden characters of untrusted text by their code points."""
    return _HIDDEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.filters |= {
    format.__name__: format for format in (shown, percent, hundredths, points, place, seen, is_answer)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rate with its interval, all in [0, 1]."""

    label: str
    note: str
    rate: float
    interval: tuple[float, float]
    kind: str
    """Its colour in style.css."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A rate in [0, 1] with its interval, measured at one train step."""

    label: str
    step: float
    rate: float
    interval: tuple[float, float]
    kind: str
    """Its colour in style.css."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines over train steps. Text is escaped."""

    title: str
    xs: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    """Values at `xs` by the label of the line. A line skips values that are not finite."""
    top: float
    """Upper end of the y axis, which starts at 0."""
    marks: Sequence[Mark] = ()
    share: bool = False
    """Whether y is shown in percent."""
    intervals: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Whiskers at `xs` by the label of the line."""

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The class in style.css and the text of each key."""
        lines = [(f"s{index % _NUM_COLOURS}", name) for index, name in enumerate(self.lines)]
        return lines + [(f"mark {mark.kind}", f"{mark.label}: {100 * mark.rate:.1f}%") for mark in self.marks]

    @property
    def svg(self) -> str:
        """The chart. `xs` must not be empty."""
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
        # At most eleven whole steps at even distances.
        first, last = self._ends()
        strides = (scale * unit for scale in (10**power for power in range(12)) for unit in (1, 2, 5))
        stride = next(stride for stride in strides if (last - first) / stride <= 10)
        steps = range(math.ceil(first / stride) * stride, math.floor(last) + 1, stride)
        for index, step in enumerate(steps):
            name, x = f"step {step}" if index == 0 else str(step), self._across(step)
            yield f'<text class="note" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{name}</text>'

    def _drawn_lines(self) -> Iterator[str]:
        for index, (name, ys) in enumerate(self.lines.items()):
            finite = [at for at, y in enumerate(ys) if math.isfinite(y)]
            places = [(self._across(self.xs[at]), self._up(ys[at])) for at in finite]
            points, colour = " ".join(f"{x:.1f},{y:.1f}" for x, y in places), f"s{index % _NUM_COLOURS}"
            for at in finite if name in self.intervals else ():
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
