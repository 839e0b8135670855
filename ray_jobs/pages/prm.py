"""The quality of a process reward model, for people who look before they read: can its scores be trusted?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_jobs.pages.charts import reliability_diagram
from ray_jobs.pages.render import finite, finite_pair, write_page

Quality = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrmQuality:
    """What `reward.prm.quality.evaluate_prm` found; what in it is missing, None or no finite number is shown as "not
    defined". `bins` are (count, mean score, mean label); `top_error` ends the scale of the squared errors."""

    found: Quality
    bins: Sequence[tuple[float, float, float]]
    diagram: str
    top_error: float
    canary_limit: float
    """Junk decisions must score below it."""


def prm_quality(found: Quality, *, canary_limit: float) -> PrmQuality:
    bins = list(_bins(found))
    errors = [finite(found.get(key)) for key in ("mse", "mse_baseline_constant", "mse_baseline_length")]
    errors += finite_pair(found.get("mse_ci95")) or ()
    top = max((error for error in errors if error is not None), default=0.0) or 1.0
    diagram = reliability_diagram(bins) if bins else ""
    return PrmQuality(found=found, bins=bins, diagram=diagram, top_error=1.1 * top, canary_limit=canary_limit)


def write_prm_page(folder: Path, found: Quality, *, canary_limit: float) -> Path:
    """`prm_quality.html`: the quality of a PRM that was trained by itself, outside of a run. Raises OSError."""
    return write_page(folder / "prm_quality.html", "prm_page", prm=prm_quality(found, canary_limit=canary_limit))


def _bins(found: Quality) -> Iterator[tuple[float, float, float]]:
    for row in found.get("reliability") or ():
        count, score, label = (finite(row.get(key)) for key in ("count", "mean_pred", "mean_label"))
        if count is not None and score is not None and label is not None:
            yield count, score, label
