"""Which cluster a run joins, and what is said where it cannot."""

import http.server
import socket
import threading

import pytest
import ray

from actors.cluster import start_ray
from configs.cluster import ClusterConfig
from configs.errors import UserError
from configs.loading import load_run_config
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
        (None, "http://head:8265", None),
    ],
)
def test_recipe_says_which_cluster_else_the_job_that_the_run_is_in(address, environment, joined, monkeypatch):
    if environment:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    assert ClusterConfig(address=address).joined == joined


def test_address_that_no_run_can_join_is_refused_with_the_command_that_can():
    with pytest.raises(UserError, match="agentflow submit --address ray://head:10001"):
        load_run_config(None, ["cluster.address=ray://head:10001"])


def test_cluster_that_is_not_there_is_said_at_once():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    with pytest.raises(UserError, match=r"nothing listens at .*`ray status --address"):
        start_ray(ClusterConfig(address=f"127.0.0.1:{port}"))


def test_in_a_job_the_head_nodes_devices_say_nothing_about_where_models_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr("ray_jobs.run.preflight.check_model", lambda config, training, download: tmp_path)
    check_before_start(load_run_config(None, [f"output_dir={tmp_path}/runs", "learner.num_threads=64"]))


def test_a_machine_that_is_too_busy_for_ray_is_one_line(monkeypatch):
    def late(**_):
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr("actors.cluster.ray.init", late)
    with pytest.raises(UserError, match="give the command again"):
        start_ray(ClusterConfig())


def test_another_fault_of_ray_keeps_its_traceback(monkeypatch):
    def broken(**_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("actors.cluster.ray.init", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        start_ray(ClusterConfig())


def test_port_of_the_dashboard_is_told_from_that_of_the_cluster():
    """Regression: Ray asked it for a minute."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match=r"a web server listens at .*; give the port of the cluster itself"):
            start_ray(ClusterConfig(address=f"127.0.0.1:{listening.server_port}"))
        listening.shutdown()


def test_cluster_of_other_versions_is_told_with_both(monkeypatch):
    """Regression: the line that was told ended before the versions."""

    def mismatch(**_):
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.11.9\n"
            "This process on head:6379 was started with:\n    Ray: 2.60.0\n    Python: 3.11.10\n"
        )

    monkeypatch.setattr("actors.cluster.find_cluster", lambda address: address)
    monkeypatch.setattr("actors.cluster.ray.init", mismatch)
    with pytest.raises(UserError, match=r"Ray: 2.59.0 Python: 3.11.9 This .* Ray: 2.60.0 .* or send the run there"):
        start_ray(ClusterConfig(address="head:6379"))


def test_cluster_that_asks_for_a_token_is_one_line(monkeypatch):
    def refused(**_):
        raise ray.exceptions.AuthenticationError("Token authentication is enabled but no token was found")

    monkeypatch.setattr("actors.cluster.find_cluster", lambda address: address)
    monkeypatch.setattr("actors.cluster.ray.init", refused)
    with pytest.raises(UserError, match=r"no token was found.*RAY_AUTH_MODE=token is set"):
        start_ray(ClusterConfig(address="head:6379"))
