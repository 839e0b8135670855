"""What `time_to_skill.py` measured: curves over seconds of RL, when each reaches the skill, a table, a drawing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

Pair = tuple["Curve", "Curve"]
"""Ours and TRL's, of one seed."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 220, 52, 130, 26, 30
_COLOURS = ("#0b6e4f", "#b3541e")
_STYLE = "text{font:12px sans-serif;fill:#333}.grid{stroke:#ddd}.skill{stroke:#888;stroke-dasharray:4 4}"


@dataclass(frozen=True, slots=True)
class Point:
    """`sampled`: completions until then; `rate`: share of the held-out tasks that the adapter of this step solves."""

    step: int
    seconds: float
    sampled: int
    rate: float


@dataclass(frozen=True, slots=True)
class Curve:
    arm: str
    seed: int
    points: Sequence[Point]

    def reached(self, threshold: float) -> Point | None:
        """The first evaluation at or above it."""
        return next((point for point in self.points if point.rate >= threshold), None)


def table(pairs: Sequence[Pair], threshold: float) -> str:
    """In Markdown, a row for each seed. A side that does not get there has a lower bound."""
    head = (
        f"| seed | at the start, ours and TRL | ours, s to {threshold:.0%} | TRL, s to {threshold:.0%} | ratio "
        "| rate there, ours and TRL | steps | completions sampled |\n"
        "| --- | --- | ---: | ---: | ---: | --- | --- | --- |"
    )
    return "\n".join((head, *(_row(*pair, threshold) for pair in pairs)))


def _row(ours: Curve, trl: Curve, threshold: float) -> str:
    ends = [curve.reached(threshold) or curve.points[-1] for curve in (ours, trl)]
    missed = [curve.reached(threshold) is None for curve in (ours, trl)]
    seconds = [f"{'not in ' * miss}{end.seconds:.0f}" for miss, end in zip(missed, ends, strict=True)]
    cells = (
        str(ours.seed),
        " and ".join(f"{curve.points[0].rate:.1%}" for curve in (ours, trl)),
        *seconds,
        "none" if missed[0] else f"{'at least ' * missed[1]}{ends[1].seconds / ends[0].seconds:.1f}x",
        " and ".join(f"{end.rate:.1%}" for end in ends),
        " and ".join(str(end.step) for end in ends),
        " and ".join(f"{end.sampled:,}" for end in ends),
    )
    return f"| {' | '.join(cells)} |"


def drawing(pairs: Sequence[Pair], threshold: float) -> str:
    """An SVG with a panel for each seed, all over the same seconds."""
    last_s = max(curve.points[-1].seconds for pair in pairs for curve in pair)
    panels = "".join(
        f'<g transform="translate(0 {number * _HEIGHT})">{"".join(_panel(pair, threshold, last_s))}</g>'
        for number, pair in enumerate(pairs)
    )
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT * len(pairs)}"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}><style>{_STYLE}</style>{ground}{panels}</svg>\n'


def _panel(pair: Pair, threshold: float, last_s: float) -> Iterator[str]:
    def across(seconds: float) -> float:
        return _LEFT + seconds / last_s * (_WIDTH - _LEFT - _RIGHT)

    def up(rate: float) -> float:
        return _TOP + (1 - rate) * (_HEIGHT - _TOP - _BOTTOM)

    yield f'<text x="{_LEFT}" y="16">seed {pair[0].seed}: held-out tasks solved, over seconds of RL</text>'
    for rate, kind in ((0, "grid"), (0.5, "grid"), (1, "grid"), (threshold, "skill")):
        yield f'<path class="{kind}" d="M{_LEFT} {up(rate):.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text x="{_LEFT - 6}" y="{up(rate) + 4:.1f}" text-anchor="end">{rate:.0%}</text>'
    for seconds in (0.0, last_s / 2, last_s):
        yield f'<text x="{across(seconds):.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{seconds:.0f} s</text>'
    for curve, colour in zip(pair, _COLOURS, strict=True):
        places = [(across(point.seconds), up(point.rate)) for point in curve.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)
        x, y = places[-1]
        yield f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" style="fill:{colour}">{escape(curve.arm)}</text>'
