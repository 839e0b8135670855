"""The curves of the report, over train steps."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ray_jobs.charts import Mark, line_chart
from ray_jobs.held_out import held_out_rates

Record = Mapping[str, Any]


def learning_curve(steps: Sequence[Record], summary: Mapping[str, Any]) -> str:
    """The solve rate while sampling, and the held-out rates before the first and after the last train step."""
    marks = [
        Mark(
            label=f"held out, {one.policy} RL",
            step=one.step,
            rate=one.rate,
            low=one.low,
            high=one.high,
            kind=one.policy,
        )
        for one in held_out_rates(summary)
    ]
    sampled = {"rollout/solve_rate": "while sampling, all drawn groups"}
    note = (
        "Line: attempts at training tasks, sampled. Diamonds: held-out tasks, answered greedily, 95% Wilson intervals."
    )
    return _chart(steps, sampled, "Tasks solved, over train steps", marks=marks, share=True) + (
        f'<p class="soft">{note}</p>' if steps else ""
    )


def training_curves(steps: Sequence[Record]) -> str:
    """Signal, staleness and speed over train steps."""
    signal = {"rollout/groups_kept_share": "share of groups with signal"}
    staleness = {"policy/staleness_max": "train steps between sampling and training"}
    times = {"learner/step_s": "the learner computed", "learner/wait_s": "the learner waited for rollouts"}
    return (
        _chart(steps, signal, "Groups with some right and some wrong attempts", share=True)
        + _chart(steps, staleness, "Age of the oldest token in a batch")
        + _chart(steps, times, "Seconds per train step")
    )


def _chart(
    steps: Sequence[Record], names: Mapping[str, str], title: str, *, marks: Sequence[Mark] = (), share: bool = False
) -> str:
    """Steps where a value is missing or not finite are left out."""
    rows = [row for row in steps if all(math.isfinite(row.get(key, math.nan)) for key in names)]
    if not rows:
        return f"<p>Not logged: {escape(title)}.</p>"
    lines = {name: [float(row[key]) for row in rows] for key, name in names.items()}
    # The grid has four rows: multiples of four keep its labels whole.
    top = 1.0 if share else 4.0 * max(1, math.ceil(max(map(max, lines.values())) / 4))
    return line_chart([float(row["step"]) for row in rows], lines, top=top, title=title, marks=marks, share=share)
