"""What the tests of submitted jobs share."""

import pytest


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with a recipe, as the current one."""
    from ray_jobs.jobs.client import ADDRESS_VARIABLES

    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.toml").write_text('name = "mine"\nseed = 3\n')
    monkeypatch.chdir(tmp_path)
    for name in (*ADDRESS_VARIABLES, "TAVILY_API_KEY", "TAVILY_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def server(monkeypatch):
    """Every command talks to this one."""
    # Most files of this folder do without Ray.
    from ray_jobs.jobs.client import JobServer
    from scripted_jobs import ScriptedClient, make_job

    server = JobServer("http://127.0.0.1:8265", ScriptedClient(make_job()))
    for module in ("jobs.submit", "jobs.watch"):
        monkeypatch.setattr(f"ray_jobs.{module}.connect", lambda address: server)
    return server
