"""The Grafana dashboard of the table of metrics, in Grafana's JSON model."""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from ray_jobs.metrics.bottleneck import LIMITS
from ray_jobs.metrics.table import BY_NAME, LIVE, LIVE_ROW, LOGGED_ROWS, Metric, Panel, Row, Unit

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UNITS: Mapping[Unit, str] = {"share": "percentunit", "s": "s"}
"""Grafana's names; all others are short numbers."""

ENGINE_PANELS: Mapping[str, tuple[str, str, str]] = {
    "Requests": (
        "short",
        "Requests that the engines decode",
        "sum by (WorkerId) (ray_vllm_num_requests_running)",
    ),
    "Requests that wait": (
        "short",
        "Requests that wait in the engines",
        "sum by (WorkerId) (ray_vllm_num_requests_waiting)",
    ),
    "Sampled tokens per second": (
        "short",
        "Tokens that the engines generate",
        "sum by (WorkerId) (rate(ray_vllm_generation_tokens_total[2m]))",
    ),
    "Prompt tokens per second": (
        "short",
        "Tokens of prompts, cached ones included",
        "sum by (WorkerId) (rate(ray_vllm_prompt_tokens_total[2m]))",
    ),
    "KV cache": ("percentunit", "Of the KV cache: in use", "max by (WorkerId) (ray_vllm_kv_cache_usage_perc)"),
    "Prefix cache hits": (
        "percentunit",
        "Of the prompt tokens looked up: found in the prefix cache",
        "sum by (WorkerId) (rate(ray_vllm_prefix_cache_hits_total[2m]))"
        " / sum by (WorkerId) (rate(ray_vllm_prefix_cache_queries_total[2m]))",
    ),
}
"""Title, unit, what it says, expression: vLLM's own metrics, with rollout.engine.metrics = true."""

CLUSTER_PANELS: Mapping[str, tuple[str, str, str]] = {
    "CPU": ("percent", "Of each machine's cores: busy", "max by (instance) (ray_node_cpu_utilization)"),
    "Memory": (
        "percentunit",
        "Of each machine's memory: used",
        "max by (instance) (ray_node_mem_used) / max by (instance) (ray_node_mem_total)",
    ),
    "GPU": ("percent", "Of each card: busy", "max by (instance, GpuIndex) (ray_node_gpus_utilization)"),
    "GPU memory": ("mbytes", "Used on each card", "max by (instance, GpuIndex) (ray_node_gram_used)"),
}


def dashboard() -> dict[str, Any]:
    """A row for each question, a panel for each chart. `deploy/grafana/agentflow.json` is this."""
    return {
        "uid": "agentflow",
        "title": "agentflow",
        "description": "Asynchronous RL on Ray: learning, limits, groups, staleness and workers of each run",
        "tags": ["agentflow", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables()},
        "panels": _placed([*map(_row, LOGGED_ROWS), _row(LIVE_ROW), *_fixed_rows()]),
    }


def _variables() -> list[dict[str, Any]]:
    runs = "label_values(ray_agentflow_groups_drawn, run)"
    return [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "current": {},
            "options": [],
        },
        {
            "name": "run",
            "label": "Run",
            "type": "query",
            "datasource": SOURCE,
            "definition": runs,
            "query": {"query": runs, "refId": "run"},
            "refresh": 2,
            "sort": 1,
            "hide": 0,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "options": [],
        },
    ]


def _row(row: Row) -> tuple[str, list[dict[str, Any]]]:
    return row.question, [_panel(panel) for panel in row.panels]


def _fixed_rows() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for title, panels in {
        "What are the engines doing? (rollout.engine.metrics = true)": ENGINE_PANELS,
        "How are the machines?": CLUSTER_PANELS,
    }.items():
        yield (
            title,
            [
                _chart(name, says, unit, [_target(expression, "{{instance}} {{GpuIndex}} {{WorkerId}}")])
                for name, (unit, says, expression) in panels.items()
            ],
        )


def _panel(panel: Panel) -> dict[str, Any]:
    metrics = [BY_NAME[name] for name in panel.names]
    says = "\n\n".join(f"**{metric.title}**: {metric.says}." for metric in metrics)
    chart = _chart(panel.title, says, _UNITS.get(metrics[0].unit, "short"), list(map(_metric_target, metrics)))
    return _timeline(chart) if "util/bottleneck" in panel.names else chart


def _metric_target(metric: Metric) -> dict[str, Any]:
    # The driver of a resumed run is another process, which Ray counts as another series of the same run.
    by, name = ("run, worker", "{{run}} {{worker}}") if metric in LIVE else ("run", "{{run}}")
    return _target(f'max by ({by}) ({metric.gauge}{{run=~"$run"}})', f"{name} {metric.title}")


def _target(expression: str, legend: str) -> dict[str, Any]:
    return {"datasource": SOURCE, "editorMode": "code", "expr": expression, "legendFormat": legend, "range": True}


def _chart(title: str, says: str, unit: str, targets: list[dict[str, Any]]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": unit,
        "custom": {"drawStyle": "line", "lineWidth": 2, "fillOpacity": 5, "showPoints": "auto", "spanNulls": True},
    }
    if unit == "percentunit":
        defaults |= {"min": 0, "max": 1}
    return {
        "type": "timeseries",
        "title": title,
        "description": says,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [{"refId": chr(ord("A") + index)} | target for index, target in enumerate(targets)],
    }


def _timeline(chart: dict[str, Any]) -> dict[str, Any]:
    """A number that stands for a word, as the word."""
    words = {str(index): {"text": limit.replace("_", " "), "index": index} for index, limit in enumerate(LIMITS)}
    defaults = {
        "color": {"mode": "palette-classic"},
        "mappings": [{"type": "value", "options": words}],
        "custom": {"fillOpacity": 70, "lineWidth": 0, "spanNulls": True},
    }
    options = {
        "mergeValues": True,
        "showValue": "auto",
        "alignValue": "left",
        "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    field_config = {"defaults": defaults, "overrides": []}
    return chart | {"type": "state-timeline", "options": options, "fieldConfig": field_config}


def _placed(rows: list[tuple[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Three panels side by side on Grafana's 24 columns; rows below the second are folded."""
    numbers, y = count(1), 0
    placed: list[dict[str, Any]] = []
    for index, (question, panels) in enumerate(rows):
        folded = index > 1
        row = {
            "id": next(numbers),
            "type": "row",
            "title": question,
            "collapsed": folded,
            "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
            "panels": [],
        }
        y += 1
        inside = [
            panel | {"id": next(numbers), "gridPos": {"h": 8, "w": 8, "x": 8 * (place % 3), "y": y + 8 * (place // 3)}}
            for place, panel in enumerate(panels)
        ]
        placed += [row | {"panels": inside}] if folded else [row, *inside]
        y += 0 if folded else 8 * -(-len(panels) // 3)
    return placed
