"""Files made from the table of metrics: the Grafana dashboard and the page that explains every metric.

`python -m ray_jobs.metrics.pages` writes both; a test fails while they say something else than the table."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ray_jobs.metrics.bottleneck import LIMITS
from ray_jobs.metrics.grafana import dashboard
from ray_jobs.metrics.table import BY_NAME, LIVE_ROW, LOGGED_ROWS, Row
from ray_jobs.metrics.tensorboard import HISTOGRAMS, TEXTS

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "agentflow.json"
PAGE = ROOT / "docs" / "metrics.md"


def write_pages() -> None:
    DASHBOARD.parent.mkdir(parents=True, exist_ok=True)
    DASHBOARD.write_text(dashboard_file(), encoding="utf-8")
    PAGE.write_text(metrics_page(), encoding="utf-8")


def dashboard_file() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


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
    for row in LOGGED_ROWS:
        yield f"\n## {row.question}"
        yield from _table(row)
    yield f"\n## {LIVE_ROW.question}\n"
    yield "Gauges only, which each worker sets as it happens, with the tags `run` and `worker`."
    yield from _table(LIVE_ROW)
    yield "\n## The numbers of util/bottleneck\n\n| number | what limits |\n| --- | --- |"
    yield from (f"| {index} | {limit.replace('_', ' ')} |" for index, limit in enumerate(LIMITS))
    yield "\n## Histograms\n\nIn TensorBoard, over the trajectories that the step trained."
    yield from _rows(HISTOGRAMS)
    yield "\n## Texts\n\nIn TensorBoard."
    yield from _rows(TEXTS)


def _table(row: Row) -> Iterator[str]:
    yield "\n| metric | unit | what it says |\n| --- | --- | --- |"
    for name in (name for panel in row.panels for name in panel.names):
        yield f"| `{name}` | {BY_NAME[name].unit} | {BY_NAME[name].says} |"


def _rows(said: Mapping[str, str]) -> Iterator[str]:
    yield "\n| name | what it counts or shows |\n| --- | --- |"
    yield from (f"| `{name}` | {says} |" for name, says in said.items())


if __name__ == "__main__":
    write_pages()
