"""Fixtures of the tests of submitted jobs."""

import os
import sys

import pytest


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with a recipe, as the current one."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.toml").write_text('name = "mine"\nseed = 3\noutput_dir = "runs"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS", "TAVILY_API_KEY", "TAVILY_API_KEY_FILE"):
        monkeypatch.setenv(name, "")  # so that what `submit` sets is undone
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A scripted job server on this machine that every command uses."""
    from scripted_jobs import ScriptedClient

    from ray_jobs import submit

    server = ScriptedClient()
    monkeypatch.setattr(submit, "JobSubmissionClient", lambda address: server)
    monkeypatch.setattr(submit, "get_default_ray_temp_dir", lambda: tmp_path)
    monkeypatch.setattr(submit, "use_token", lambda: None)
    monkeypatch.setattr(submit, "POLL_S", 0.0)
    (tmp_path / "session_elsewhere").mkdir(exist_ok=True)
    return server


@pytest.fixture
def ray_token():
    """A function that makes this process use the token in a file.

    Ray caches mode and token for the whole process, and sets RAY_AUTH_MODE in the environment when it finds a token:
    without this, a test would use the token of the cluster that an earlier test started.
    """
    from ray._private.authentication_test_utils import reset_auth_token_state

    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")
    before = {name: os.environ.pop(name, None) for name in names}

    def use(path):
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path))
        reset_auth_token_state()

    yield use
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    reset_auth_token_state()
