"""What Prometheus finds at a run's metrics endpoint."""

import urllib.request

import pytest
import ray
from stage import make_config, open_stage, wait_until

from actors.cluster import WORKER_GAUGES, gauge_name
from ray_jobs.run.metrics import DESCRIPTIONS
from rollout.files import read_records

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def scraped(cluster, tmp_path_factory):
    """The run's last row of metrics, what the endpoint said after it, line by line, and the names of the run's
    actors."""
    with open_stage(make_config(tmp_path_factory.mktemp("runs"), "num_steps=2", "name=gauges")) as stage:
        stage.finish(stage.reinforce())
        (row,) = [one for one in read_records(stage.folder / "metrics.jsonl") if one["step"] == 2]
        lines = []

        def complete():
            lines[:] = scrape()
            return any("agentflow_worker" in line for line in lines) and value_of(
                lines, "groups/drawn", run="gauges"
            ) == [row["groups/drawn"]]

        wait_until(complete)
        yield row, lines, ray.util.list_named_actors()


def scrape():
    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode().splitlines()


def value_of(lines, metric, **tags):
    """The values of a gauge's series that carry these tags."""
    series = [line for line in lines if line.startswith(f"ray_{gauge_name(metric)}{{")]
    asked = [f'{name}="{value}"' for name, value in tags.items()]
    return [float(line.rpartition(" ")[2]) for line in series if all(one in line for one in asked)]


def test_every_metric_of_a_train_step_is_a_gauge_with_the_run_s_name_and_its_description(scraped):
    row, lines, *_ = scraped
    for name in row.keys() - {"step", "wall_s"}:
        assert value_of(lines, name, run="gauges") == [pytest.approx(row[name])], name
    assert f"# HELP ray_agentflow_groups_drawn {DESCRIPTIONS['groups/drawn']}" in lines


def test_workers_tell_their_state_themselves(scraped):
    _, lines, *_ = scraped
    assert {name for name in WORKER_GAUGES if value_of(lines, name, run="gauges", worker="0")} == WORKER_GAUGES.keys()
    assert value_of(lines, "worker/places") == [4.0]


def test_actors_have_names_of_their_run_and_part(scraped):
    roles = ("dynamic-sampling", "learner", "rollout-0")
    assert {name.rpartition(":")[0] for name in scraped[-1]} == {f"agentflow:gauges:{role}" for role in roles}
