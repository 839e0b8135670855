"""What every page is made of: the frame with its style, tables, and numbers as words."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ray_jobs.pages.prm import PRM_STYLE

_STYLES = [Path(__file__).parents[1] / "viewer/static/palette.css", Path(__file__).with_name("style.css")]


def page_of(title: str, body: str) -> str:
    styles = "".join(path.read_text() for path in _STYLES)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{styles}{PRM_STYLE}</style><body>{body}</body></html>"
    )


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """The first column is words, the others are numbers."""
    lines = ""
    for tag, (first, *others) in [("th", header), *(("td", row) for row in rows)]:
        numbers = "".join(f'<{tag} class="num">{escape(cell)}</{tag}>' for cell in others)
        lines += f"<tr><{tag}>{escape(first)}</{tag}>{numbers}</tr>"
    return f'<div class="scroll"><table>{lines}</table></div>' if rows else ""


def facts_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Words in every column. What is the same in all columns stands once, across them."""
    lines = "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>" if any(header) else ""
    for first, *others in rows:
        same = len(set(others)) == 1
        cells = (
            f'<td colspan="{len(others)}">{escape(others[0])}</td>'
            if same
            else "".join(f"<td>{escape(other)}</td>" for other in others)
        )
        lines += f"<tr><th>{escape(first)}</th>{cells}</tr>"
    return f'<div class="scroll"><table>{lines}</table></div>'


def percent(rate: float | None) -> str:
    return "not measured" if rate is None else f"{100 * rate:.1f}%"


def shown(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {shown(part)}" for name, part in value.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
