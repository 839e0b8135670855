"""Render the pages: one jinja2 environment that escapes every value, and numbers as words."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rollout.files import write_whole
from rollout.types import is_answer

TEMPLATES = Path(__file__).with_name("templates")
STYLES = (Path(__file__).with_name("static") / "palette.css", TEMPLATES / "style.css")
UNDEFINED = "not defined"


def write_page(path: Path, template: str, **values: object) -> Path:
    """Write `path` from `templates/TEMPLATE.html.j2`; a reader sees the old page or the new one. Raises OSError."""
    styles = "".join(style.read_text(encoding="utf-8") for style in STYLES)
    page = _ENVIRONMENT.get_template(f"{template}.html.j2").render(values, styles=styles)
    # What a model wrote may hold half of a surrogate pair, which UTF-8 cannot encode.
    write_whole(path, page.encode(errors="replace"))
    return path


def shown(value: object) -> str:
    """Any JSON value as words."""
    if value is None:
        return "missing"
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {shown(part)}" for name, part in value.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def percent(rate: float | None) -> str:
    return "not measured" if rate is None else f"{100 * rate:.1f}%"


def hundredths(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.1f}"


def points(rates: Sequence[float], *, signed: bool = False) -> str:
    """The ends of an interval, in hundredths."""
    return " to ".join(f"{100 * rate:{'+' if signed else ''}.1f}" for rate in rates)


def place(value: float, low: float = 0.0, high: float = 1.0) -> str:
    """Where a value lies on a track from `low` to `high`, in percent of its width; never beyond its ends."""
    return f"{100 * min(max(0.0, (value - low) / (high - low)), 1.0):.2f}"


def finite(value: object) -> float | None:
    """None for what is no finite number, whatever it is."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def finite_pair(value: object) -> tuple[float, float] | None:
    low, high = map(finite, value) if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    return (low, high) if low is not None and high is not None else None


def number(value: object, form: str = "{:.3f}") -> str:
    known = finite(value)
    return UNDEFINED if known is None else form.format(known)


def between(value: object, form: str = "{:.3f}") -> str:
    ends = finite_pair(value)
    return f"95% interval {f'{form} to {form}'.format(*ends) if ends else UNDEFINED}"


def estimate(numbers: Mapping[str, Any], key: str, form: str = "{:.3f}") -> str:
    """`numbers[key]` with the interval under `key_ci95`."""
    if finite(numbers.get(key)) is None:
        return UNDEFINED
    return f"{number(numbers[key], form)} ({between(numbers.get(f'{key}_ci95'), form)})"


def tally(values: Sequence[float]) -> str:
    """How often each value occurs, and their mean where they differ."""
    counts = Counter(f"{value:+.2f}" for value in values).most_common()
    mean = f"; mean {fmean(values):+.2f}" if len(counts) > 1 else ""
    return ", ".join(f"{value} ×{count}" for value, count in counts) + mean


# What cannot be seen, and what turns the direction of reading: the words after it would be read backwards.
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def seen(text: str) -> str:
    """What models and tools wrote, with hidden characters by their numbers."""
    return _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_WORDS = (
    shown,
    percent,
    hundredths,
    points,
    place,
    finite,
    finite_pair,
    number,
    between,
    estimate,
    tally,
    seen,
    is_answer,
)
_ENVIRONMENT.filters |= {word.__name__: word for word in _WORDS}
