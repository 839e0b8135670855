"""Numbers as gauges of Ray: what its metrics endpoint tells Prometheus, whenever that asks."""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

WORKER_GAUGES: Mapping[str, str] = {
    "worker/policy_version": "Policy version that the worker has proven and samples with",
    "worker/running": "Groups that run on the worker",
    "worker/places": "Groups that the engine's cache allows at a time",
    "worker/kv_usage": "Of the engine's KV cache: in use",
    "worker/waiting": "Requests that wait for a place in the engine",
}
"""What rollout workers say of themselves as it happens, also where no train step ends for long."""


def gauge_name(metric: str) -> str:
    """`rollout/solve_rate` is `agentflow_rollout_solve_rate`; Prometheus sees it with Ray's own `ray_` in front."""
    return "agentflow_" + metric.replace("/", "_")


def set_gauges(values: Mapping[str, float], descriptions: Mapping[str, str], **tags: str) -> None:
    """Set a gauge for each value that is described, with these tags; they stay until set again or until the process
    ends. Every call for a metric has the same tag keys. What is not a number is left as it was."""
    for metric, value in values.items():
        if metric in descriptions and math.isfinite(value):
            _gauge(metric, descriptions[metric], tuple(tags)).set(value, tags=tags)


@cache
def _gauge(metric: str, description: str, tag_keys: tuple[str, ...]) -> Any:
    from ray.util.metrics import Gauge

    return Gauge(gauge_name(metric), description, tag_keys)
