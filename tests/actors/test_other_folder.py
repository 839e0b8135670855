"""A cluster that was started in another folder than the driver is in."""

import pytest
from stage import SMALL, check_law, local_ray, open_stage

from configs.loading import load_run_config

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]


def test_run_with_a_relative_folder_is_in_one_place(tmp_path, monkeypatch):
    cluster, home = tmp_path / "cluster", tmp_path / "home"
    for folder in (cluster, home):
        folder.mkdir()
    monkeypatch.chdir(cluster)
    with local_ray():
        monkeypatch.chdir(home)
        config = load_run_config(None, [*SMALL, "output_dir=runs", "name=r"])
        with open_stage(config) as stage:
            facts = stage.finish(stage.reinforce())
    check_law(home / "runs" / "r", facts)
    assert not (cluster / "runs").exists()
