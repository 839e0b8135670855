"""The page that explains every metric, from the table of metrics.

`python -m ray_jobs.metrics.pages` writes it; a test fails while it says something else than the table."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from ray_jobs.metrics.bottleneck import LIMITS
from ray_jobs.metrics.table import BY_NAME, CHARTS, LIVE, Metric
from ray_jobs.metrics.tensorboard import HISTOGRAMS, TEXTS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def metrics_page() -> str:
    return "\n".join((*_lines(), ""))


def _lines() -> Iterator[str]:
    yield "# Every metric\n"
    yield "<!-- Made from ray_jobs/metrics/table.py by `python -m ray_jobs.metrics.pages`. -->\n"
    yield (
        "Each row of `metrics.jsonl` holds these names; so does TensorBoard. Ray's metrics endpoint has them as gauges "
        "with the tag\n`run`: `rollout/solve_rate` is `ray_agentflow_rollout_solve_rate` to Prometheus. "
        "[Watching a run](watching.md) says where to look\nat them."
    )
    for question, charts in CHARTS.items():
        yield f"\n## {question}"
        yield from _table(BY_NAME[name] for name in chain.from_iterable(charts.values()))
    yield "\n## What are the workers doing?\n"
    yield "Gauges only, which each worker sets as it happens, with the tags `run` and `worker`."
    yield from _table(LIVE)
    yield "\n## The numbers of util/bottleneck\n\n| number | what limits |\n| --- | --- |"
    yield from (f"| {index} | {limit.replace('_', ' ')} |" for index, limit in enumerate(LIMITS))
    yield "\n## Histograms\n\nIn TensorBoard, over the trajectories that the step trained."
    yield from _rows(HISTOGRAMS)
    yield "\n## Texts\n\nIn TensorBoard."
    yield from _rows(TEXTS)


def _table(metrics: Iterable[Metric]) -> Iterator[str]:
    yield "\n| metric | unit | what it says |\n| --- | --- | --- |"
    yield from (f"| `{metric.name}` | {metric.unit} | {metric.says} |" for metric in metrics)


def _rows(said: Mapping[str, str]) -> Iterator[str]:
    yield "\n| name | what it counts or shows |\n| --- | --- |"
    yield from (f"| `{name}` | {says} |" for name, says in said.items())


if __name__ == "__main__":
    PAGE.write_text(metrics_page(), encoding="utf-8")
