"""What Prometheus finds at a run's metrics endpoint."""

import urllib.request

import pytest
import ray
from stage import make_config, open_stage, wait_until

from actors.cluster import WORKER_GAUGES, gauge_name
from ray_jobs.run.metrics import DESCRIPTIONS
from rollout.files import read_records

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def scrape():
    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode().splitlines()


def value_of(lines, metric, **tags):
    """The values of a gauge's series that carry these tags."""
    series = [line for line in lines if line.startswith(f"ray_{gauge_name(metric)}{{")]
    asked = [f'{name}="{value}"' for name, value in tags.items()]
    return [float(line.rpartition(" ")[2]) for line in series if all(one in line for one in asked)]


def test_metrics_of_steps_and_states_of_workers_are_gauges_with_the_run_s_name(cluster, tmp_path):
    with open_stage(make_config(tmp_path, "num_steps=2", "name=gauges")) as stage:
        stage.finish(stage.reinforce())
        names = {name.rpartition(":")[0] for name in ray.util.list_named_actors()}
        assert names == {f"agentflow:gauges:{role}" for role in ("dynamic-sampling", "learner", "rollout-0")}
        (row,) = [one for one in read_records(stage.folder / "metrics.jsonl") if one["step"] == 2]
        lines = []

        def complete():
            lines[:] = scrape()
            drawn = value_of(lines, "groups/drawn", run="gauges")
            return drawn == [row["groups/drawn"]] and value_of(lines, "worker/places")

        wait_until(complete)
    for name in row.keys() - {"step", "wall_s"}:
        assert value_of(lines, name, run="gauges") == [pytest.approx(row[name])], name
    assert f"# HELP ray_agentflow_groups_drawn {DESCRIPTIONS['groups/drawn']}" in lines
    assert {name for name in WORKER_GAUGES if value_of(lines, name, run="gauges", worker="0")} == WORKER_GAUGES.keys()
    assert value_of(lines, "worker/places") == [4.0]
