import json
import re
from itertools import chain
from pathlib import Path

import pytest
import torch

from actors.cluster import WORKER_GAUGES, gauge_name
from learner.corrections import off_policy_metrics, off_policy_sums
from learner.types import StepResult, TrainBatch
from ray_jobs.metrics.bottleneck import LIMITS
from ray_jobs.metrics.grafana import CLUSTER_PANELS, ENGINE_PANELS, dashboard
from ray_jobs.metrics.pages import DASHBOARD, PAGE, dashboard_file, metrics_page
from ray_jobs.metrics.table import BY_NAME, LIVE, LIVE_ROW, LOGGED, LOGGED_ROWS
from ray_jobs.run.progress import StepTimes, step_metrics
from rollout.buffer import Batch
from rollout.store.lifecycle import GroupCounts

ROOT = Path(__file__).parents[2]
WRITTEN = re.compile(
    r"""["'f](?P<name>(?:rollout|policy|prm|bias|groups|learner|time|util|cold_start|train_prm)/\w+)"""
)


def panels():
    for panel in dashboard()["panels"]:
        yield from panel["panels"] if panel.get("panels") else [panel]


def expressions():
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def test_no_metric_is_described_twice():
    assert len(BY_NAME) == len(LOGGED) + len(LIVE)


@pytest.mark.parametrize("metric", BY_NAME.values(), ids=lambda metric: metric.name)
def test_description_is_one_short_line(metric):
    assert 10 < len(metric.says) <= 90
    assert metric.says[0].isupper() or metric.says[0].isdigit()
    assert not metric.says.endswith(".")
    assert "|" not in metric.says


def test_every_metric_stands_in_one_chart_with_metrics_of_its_kind():
    charts = [panel.names for row in (*LOGGED_ROWS, LIVE_ROW) for panel in row.panels]
    assert sorted(chain.from_iterable(charts)) == sorted(BY_NAME)
    for names in charts:
        assert len({BY_NAME[name].unit == "share" for name in names}) == 1, names


def test_every_metric_of_a_train_step_is_in_the_table():
    """All that a step can say: a batch with old and new tokens, a KL term, PRM scores, signs of bias."""
    tokens = torch.tensor([[-1.0, -1.0]])
    sums = off_policy_sums(tokens, tokens, torch.ones(1, 2), torch.tensor([[0, 1]])) | {"kl_ref_k3": 1.0}
    trained = TrainBatch(microbatches=(), num_loss_tokens=2, num_trajectories=1, num_masked_tokens=0, max_age=0)
    policy = {f"policy/{name}": 1.0 for name in off_policy_metrics(sums, trained)}
    batch = Batch(
        step=1,
        payloads=(),
        version_ages={0: 0},
        facts={"trajectories": 1.0, "prm_steps": 1.0, "prm_unscored": 1.0},
        bias={},
        counts=GroupCounts(),
        warning=None,
    )
    times = StepTimes(wait_s=1.0, train_s=1.0, publish_s=1.0, step_s=3.0)
    row = step_metrics(batch, StepResult(policy_version=1, metrics=policy), times, [])
    assert row.keys() <= BY_NAME.keys()


def test_every_metric_that_the_code_writes_out_is_in_the_table():
    rooms = ("rollout", "learner", "reward", "actors", "ray_jobs")
    texts = [path.read_text() for room in rooms for path in (ROOT / room).glob("*.py")]
    written = {found["name"] for text in texts for found in WRITTEN.finditer(text)}
    files = {name for name in written if (ROOT / name).with_suffix(".py").exists()}
    assert len(written) > 20
    assert written - files <= BY_NAME.keys()


def test_every_gauge_of_a_worker_is_in_the_table():
    assert {metric.name: metric.says for metric in LIVE} == dict(WORKER_GAUGES)


def test_gauges_carry_names_that_prometheus_takes():
    for metric in BY_NAME.values():
        assert re.fullmatch(r"ray_agentflow_[a-z0-9_]+", metric.gauge)
        assert metric.gauge == f"ray_{gauge_name(metric.name)}"


def test_dashboard_and_page_are_those_of_the_table():
    """After a change of the table: `python -m ray_jobs.metrics.pages`."""
    assert DASHBOARD.read_text() == dashboard_file()
    assert PAGE.read_text() == metrics_page()


def test_dashboard_asks_for_every_metric_and_for_no_other_of_ours():
    asked = set(re.findall(r"ray_agentflow_\w+", " ".join(expressions())))
    assert asked == {metric.gauge for metric in BY_NAME.values()}


def test_panels_of_the_dashboard_have_a_place_each_and_do_not_overlap():
    shown = json.loads(dashboard_file())["panels"]
    ids = [panel["id"] for panel in chain(shown, *(panel.get("panels", ()) for panel in shown))]
    assert len(ids) == len(set(ids))
    for group in (shown, *(panel["panels"] for panel in shown if panel.get("panels"))):
        taken = [
            (x, y)
            for at in (panel["gridPos"] for panel in group)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        ]
        assert len(taken) == len(set(taken))
        assert max(x for x, _ in taken) < 24


def test_every_panel_says_what_it_shows():
    charts = [panel for panel in panels() if panel["type"] != "row"]
    assert len(charts) == sum(len(row.panels) for row in (*LOGGED_ROWS, LIVE_ROW)) + len(ENGINE_PANELS) + len(
        CLUSTER_PANELS
    )
    assert all(panel["description"] and panel["targets"] for panel in charts)


def test_the_bottleneck_is_shown_as_a_word():
    (timeline,) = [panel for panel in panels() if panel["type"] == "state-timeline"]
    (mapping,) = timeline["fieldConfig"]["defaults"]["mappings"]
    assert [mapping["options"][str(index)]["text"] for index in range(len(LIMITS))] == [
        limit.replace("_", " ") for limit in LIMITS
    ]
