"""Fixtures of the tests of submitted jobs."""

import pytest


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with a recipe, as the current one."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.toml").write_text('name = "mine"\nseed = 3\noutput_dir = "runs"\n')
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS", "TAVILY_API_KEY", "TAVILY_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
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
