"""The cluster that a run joins, and errors of the connection."""

import socket

import pytest

from actors.cluster import start_ray
from configs.errors import UserError
from configs.loading import load_run_config
from configs.run import ClusterConfig


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
        (None, "http://head:8265", None),
    ],
)
def test_cluster_address_of_recipe_and_environment(address, environment, joined, monkeypatch):
    if environment:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    assert ClusterConfig(address=address).joined == joined


def test_ray_client_address_is_rejected():
    with pytest.raises(UserError):
        load_run_config(None, ["cluster.address=ray://head:10001"])


def test_missing_cluster_is_an_error():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    with pytest.raises(UserError):
        start_ray(ClusterConfig(address=f"127.0.0.1:{port}"))
