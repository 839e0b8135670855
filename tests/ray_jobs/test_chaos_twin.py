"""A run that was disturbed is compared with one that was not."""

import io
import json
import shutil

import pytest

from configs.loading import load_run_config
from ray_jobs.checks.chaos.audit import differences
from ray_jobs.checks.chaos.run import ChaosError, run_chaos
from rollout.records import read_records
from tests.ray_jobs.power_cut import go_on, make_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two of the same settings."""
    home = tmp_path_factory.mktemp("runs")
    for name in ("one", "other"):
        (home / name).mkdir()
        go_on(make_config(home / name, "num_steps=2"), io.StringIO())
    return home / "one" / "r", home / "other" / "r"


def test_runs_that_differ_in_their_times_alone_ended_alike(runs):
    assert differences(*runs) == []


def test_each_number_that_differs_is_named(runs, tmp_path):
    one, other = runs
    changed = tmp_path / "changed"
    shutil.copytree(other, changed)
    rows = list(read_records(changed / "metrics.jsonl"))
    rows[-1] |= {"policy/loss": 7.0, "time/step_s": 1e9, "util/learner_busy": 1e9}
    (changed / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree(max((changed / "checkpoints").glob("v*")))
    found = differences(one, changed)
    assert "step 2, policy/loss is 0.0, and 7.0 in the twin" in found
    assert "the step of the newest checkpoint is 2, and 0 in the twin" in found
    assert {line.partition(" is ")[0] for line in found} == {
        "step 2, policy/loss",
        "the step of the newest checkpoint",
        "adapter.safetensors",
        "optimizer.pt",
    }


@pytest.mark.parametrize(
    ("depth", "reason"),
    [(2, "only a job with pipeline_depth=0 has a twin"), (0, "is not the folder of a job that has")],
)
def test_twin_that_cannot_be_one_is_refused(tmp_path, depth, reason):
    config = load_run_config(None, [f"output_dir={tmp_path}", "name=r", f"pipeline_depth={depth}"])
    with pytest.raises(ChaosError, match=reason):
        run_chaos(config, [], num_faults=1, seed=0, only=[], two_machines=False, twin=tmp_path)
