"""The cluster that a run joins, and errors of the connection."""

import socket

import pytest

from actors.cluster import start_ray
from configs.errors import UserError
from configs.loading import load_run_config
from configs.run import ClusterConfig, RunConfig
from ray_jobs.run.preflight import check_before_start


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("address", "environment", "joined"),
    [
        (None, None, None),
        (None, "head:6379", "head:6379"),
        ("other:6379", "head:6379", "other:6379"),
        ("auto", None, "auto"),
        ("local", "head:6379", None),
        (None, "local", None),
        (None, " ", None),
    ],
)
def test_cluster_address_of_recipe_and_environment(address, environment, joined, monkeypatch):
    if environment:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    assert ClusterConfig(address=address).joined == joined


@pytest.mark.parametrize("address", ["ray://head:10001", "http://me:hunter2@head:8265", "https://head"])
@pytest.mark.parametrize("run", [start_ray, lambda cluster: check_before_start(RunConfig(cluster=cluster))])
def test_a_url_is_refused_where_a_run_would_join_it(address, run, monkeypatch):
    with pytest.raises(UserError, match=r"cluster\.address") as in_recipe:
        load_run_config(None, [f"cluster.address={address}"])
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match="RAY_ADDRESS") as in_environment:
        run(ClusterConfig())
    assert "hunter2" not in f"{in_recipe.value}{in_environment.value}"
    ClusterConfig(address="local").check_joined()


def test_missing_cluster_is_an_error():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    with pytest.raises(UserError):
        start_ray(ClusterConfig(address=f"127.0.0.1:{port}"))
