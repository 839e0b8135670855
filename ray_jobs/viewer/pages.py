"""HTML pages that stand alone: templates, formats of numbers, and charts as inline SVG."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from configs.api_keys import without_secrets
from rollout.files import write_whole
from rollout.types import is_answer

TEMPLATES = Path(__file__).with_name("templates")
STYLES = (Path(__file__).with_name("static") / "palette.css", TEMPLATES / "style.css")
WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 14, 30
_STRIDES = [unit * 10**power for power in range(9) for unit in (1, 2, 5)]
# Invisible characters, and those that change the direction of reading.
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def write_page(path: Path, template: str, **values: object) -> Path:
    """Write a page from `templates/TEMPLATE.html.j2` in one piece. Raises OSError."""
    styles = "".join(style.read_text(encoding="utf-8") for style in STYLES)
    page = _ENVIRONMENT.get_template(f"{template}.html.j2").render(values, styles=styles)
    # The text of a model may hold half of a surrogate pair, which UTF-8 cannot encode.
    write_whole(path, without_secrets(page).encode(errors="replace"))
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


def points(rates: Sequence[float], *, signed: bool = False) -> str:
    """Format rates as numbers from 0 to 100."""
    return " to ".join(f"{100 * rate:{'+' if signed else ''}.1f}" for rate in rates)


def answered(gain: float | None, p: float | None) -> tuple[str, str]:
    """Return whether the second policy is better, and the class of this answer in style.css."""
    if gain is None or p is None:
        return "That was not measured.", "unsure"
    if p >= 0.05:
        return "That cannot be seen here.", "unsure"
    return ("Yes.", "better") if gain > 0 else ("No, it is worse.", "unsure worse")


def seen(text: str) -> str:
    """Replace the hidden characters of untrusted text by their code points."""
    return _HIDDEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.filters |= {format.__name__: format for format in (shown, percent, points, seen, is_answer)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A measured rate with its interval, all in [0, 1]: a bar, or a diamond at its train step."""

    label: str
    rate: float
    interval: tuple[float, float]
    kind: str
    """Its colour in style.css."""
    note: str = ""
    step: int | None = None
    """Train steps before it, where that is known."""

    @property
    def text(self) -> str:
        return f"{self.label}: {percent(self.rate)}"


Point = tuple[float, float, float, float]
"""A train step, a rate in [0, 1] that may be nan, and the ends of its interval, which are equal without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Rates in percent over train steps. Text is escaped."""

    title: str
    lines: Mapping[str, Sequence[Point]]
    """Points by the label of the line."""
    marks: Sequence[Rate] = ()
    """Rates with a train step, drawn as diamonds."""

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The class in style.css and the text of each key."""
        lines = [(f"s{index % 6}", name) for index, name in enumerate(self.lines)]
        return lines + [(f"mark {mark.kind}", mark.text) for mark in self.marks]

    @property
    def svg(self) -> str:
        """The chart, which must have a point."""
        lines = {name: [point for point in points if math.isfinite(point[1])] for name, points in self.lines.items()}
        marks = [(mark, (mark.step or 0, mark.rate, *mark.interval)) for mark in self.marks]
        steps = [point[0] for point in chain(*lines.values(), (point for _, point in marks))]
        first, last = min(steps), max(steps)
        parts = list(_grid(first, last))
        for index, (name, points) in enumerate(lines.items()):
            places, colour = [_place(point, first, last) for point in points], f"s{index % 6}"
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in places)
            parts.append(f'<polyline class="line {colour}" points="{joined}"><title>{escape(name)}</title></polyline>')
            parts += [_whisker(colour, place) for place in places]
            dots = places if len(places) <= 40 else []
            parts += [f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y, _, _ in dots]
        for mark, point in marks:
            place = _place(point, first, last)
            diamond = f"M{place[0]:.1f} {place[1] - 7:.1f}l7 7l-7 7l-7 -7z"
            parts.append(_whisker(mark.kind, place))
            parts.append(f'<path class="mark {mark.kind}" d="{diamond}"><title>{escape(mark.text)}</title></path>')
        title = escape(self.title)
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


def _place(point: Point, first: float, last: float) -> Point:
    """Return where a point and its interval are drawn, if the x axis spans the steps from `first` to `last`."""
    x = _LEFT + (point[0] - first) / max(last - first, 1) * (WIDTH - _LEFT - _RIGHT)
    y, low, high = (_TOP + (1 - rate) * (HEIGHT - _TOP - _BOTTOM) for rate in point[1:])
    return x, y, low, high


def _whisker(kind: str, place: Point) -> str:
    x, _, low, high = place
    return f'<path class="reach {kind}" d="M{x:.1f} {high:.1f}V{low:.1f}"/>' if low != high else ""


def _grid(first: float, last: float) -> Iterator[str]:
    for share in (0, 0.25, 0.5, 0.75, 1):
        _, y, _, _ = _place((first, share, share, share), first, last)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}h{WIDTH - _LEFT - _RIGHT}"/>'
        yield f'<text class="note" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>'
    # At most eleven whole steps at even distances.
    stride = next(stride for stride in _STRIDES if last - first <= 10 * stride)
    for step in range(math.ceil(first / stride) * stride, math.floor(last) + 1, stride):
        x, _, _, _ = _place((step, 0, 0, 0), first, last)
        yield f'<text class="note" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{step}</text>'
