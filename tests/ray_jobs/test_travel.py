"""What of a working directory travels with a job, what must be in it, and what lasts on the cluster."""

from pathlib import Path

import pytest
from ray._private.runtime_env.packaging import get_uri_for_directory
from scripted_jobs import SECRET, make_options, plan

from configs.loading import load_run_config
from ray_jobs.cli import main
from ray_jobs.jobs import submit, travel
from ray_jobs.jobs.client import JobError
from ray_jobs.jobs.submit import plan_submission
from ray_jobs.run.begun import begun_config
from ray_jobs.run.folder import RunFolder

RECIPE = "recipes/mine.toml"


def packed(folder, excludes):
    """The names of the files that Ray packs of a folder."""
    return {path.name for path in travel._travelling(folder, excludes)}


def test_what_is_said_to_travel_is_what_ray_packs(project):
    """A file that is said to stay changes nothing about the package."""
    (project / ".gitignore").write_text("*.bin\n")
    (project / "deep").mkdir()
    (project / "deep" / ".rayignore").write_text("left\n")
    excludes = travel.excluded(project, ["big/"])
    (project / "big").mkdir()
    before = get_uri_for_directory(str(project), include_gitignore=True, excludes=excludes)
    kept = packed(project, excludes)
    for name in ("weights.bin", "deep/left", "big/one", "deep/x.safetensors", ".env"):
        (project / name).write_text("x")
    assert get_uri_for_directory(str(project), include_gitignore=True, excludes=excludes) == before
    assert packed(project, excludes) == kept
    (project / "deep" / "new").write_text("x")
    assert packed(project, excludes) - kept == {"new"}


def test_what_a_user_takes_in_again_brings_no_secrets_with_it(project):
    (project / "src").mkdir()
    for name in ("code.py", ".env", "tls.pem", "w.safetensors"):
        (project / "src" / name).write_text(SECRET)
    excludes = plan(runtime_env={"excludes": ["*", "!src", "!src/"]}).runtime_env["excludes"]
    assert packed(project, excludes) == {"code.py"}


def test_file_with_a_key_stays_however_its_path_reaches_the_folder(project, tmp_path_factory, monkeypatch):
    """Regression: through a link in its path, or with a bracket in its name, it travelled."""
    link = tmp_path_factory.mktemp("links") / "home"
    link.symlink_to(project)
    (project / "keys").mkdir()
    for name, variable in (("a", "TAVILY_API_KEY"), ("b [1]!", "OTHER_API_KEY"), ("c", "THIRD_TOKEN")):
        (project / "keys" / name).write_text(SECRET)
        monkeypatch.setenv(f"{variable}_FILE", f"{link}/keys/{name}")
    (project / "keys" / "notes").write_text("")
    excludes = plan("envs.search=tavily").runtime_env["excludes"]
    assert packed(project, excludes) == {"mine.toml", "notes"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("env_vars: {N: 1}", "env_vars.N must be text, not a number; put it in quotes"),
        ("env_vars:", "env_vars is empty"),
        ("env_vars: [A=1]", "env_vars must be a table of NAME: value, not a list"),
        ("excludes: big/", "excludes must be a list of patterns, such as [big/], not text"),
        ("pip:", "pip is empty"),
        ("pip: ['--index-url=https://me:hunter2@packages.example/simple']", "holds a key in the user part of a URL"),
        ("pip: indexed.txt", "holds a key in the user part of a URL"),
        ("pip: {packages: indexed.txt}", "holds a key in the user part of a URL"),
        ("env_vars: {MINE: sk-0123456789abcdef}", "holds a key in the word that begins with 'sk-'"),
    ],
)
def test_environment_that_ray_would_refuse_misread_or_show_is_one_line(project, server, capsys, text, said):
    (project / "env.yaml").write_text(text)
    (project / "indexed.txt").write_text("--index-url https://me:hunter2@packages.example/simple\npolars\n")
    assert main(["submit", RECIPE, "--runtime-env", "env.yaml"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "hunter2" not in error
    assert "0123456789" not in error
    assert server.client.submitted == []


@pytest.mark.parametrize(
    "text",
    [
        "pip: ['git+ssh://git@github.com/me/mine']",
        "pip: ['--index-url=https://me:${INDEX_PASSWORD}@packages.example/simple']",
        "env_vars: {WANDB_RUN_ID: 0123456789abcdef0123456789abcdef}",
    ],
)
def test_environment_without_a_key_is_taken(project, server, text):
    (project / "env.yaml").write_text(text)
    assert main(["submit", RECIPE, "--runtime-env", "env.yaml"]) == 0


OWN_AGENT = ("agent.function=agents:mine", "label.type=monte_carlo", "reward.credit=outcome")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("envs.data_path={}",), "envs.data_path"),
        (("envs.web.blocked_questions={}",), "envs.web.blocked_questions"),
        (("collect.aime_test_path={}",), "collect.aime_test_path"),
        (("envs.recording.path={}", "envs.recording.mode=replay"), "envs.recording.path"),
        ((*OWN_AGENT, "cold_start.path={}"), "cold_start.path"),
    ],
)
def test_file_that_the_recipe_reads_must_be_in_what_travels(project, server, capsys, settings, key):
    """Regression: one that .gitignore names was said to be there, and was missing on the cluster."""
    (project / ".gitignore").write_text("data/\n")
    (project / "data").mkdir()
    for path in ("gone.jsonl", "data/held.jsonl", "here.jsonl"):
        if path != "gone.jsonl":
            (project / path).write_text("")
        code = main(["submit", RECIPE, *(one.format(path) for one in settings)])
        said = capsys.readouterr().err
        assert (code == 0) == (path == "here.jsonl"), said
        if path == "gone.jsonl":
            assert f"{key} = 'gone.jsonl' is not in the working directory" in said
        if path == "data/held.jsonl":
            assert f"{key} = 'data/held.jsonl' does not travel" in said
    assert len(server.client.submitted) == 1


def test_file_beside_the_working_directory_does_not_travel(project, server, capsys):
    (project / "code").mkdir()
    (project / "code" / "r.toml").write_text("")
    (project / "held.jsonl").write_text("")
    assert main(["submit", "code/r.toml", "--working-dir", "code", "envs.data_path=../held.jsonl"]) == 2
    assert "envs.data_path = '../held.jsonl' is not in the working directory 'code'" in capsys.readouterr().err


def test_recipe_that_stays_here_is_refused(project, server, capsys):
    (project / "runs").mkdir()
    (project / "runs" / "mine.toml").write_text("")
    assert main(["submit", "runs/mine.toml"]) == 2
    assert "recipe 'runs/mine.toml' does not travel" in capsys.readouterr().err
    assert main(["submit", "demo_cpu"]) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("envs.recording.path=said.jsonl",), "envs.recording.path = 'said.jsonl' is relative"),
        (("agent.memory.type=folder", "agent.memory.path=hints"), "agent.memory.path = 'hints' is relative"),
        (("--phase", "evaluate", "--options=--out results"), "--out results is relative"),
        (("--phase", "evaluate", "--options=--adapter=runs/mine"), "--adapter runs/mine is relative"),
    ],
)
def test_what_a_job_writes_lasts_or_is_refused(project, server, capsys, settings, said):
    """Regression: it was written into the job's working directory, which Ray removes."""
    assert main(["submit", RECIPE, *settings]) == 2
    assert said in capsys.readouterr().err
    absolute = [one.replace("said.jsonl", "/s/said.jsonl").replace("hints", "/s/hints") for one in settings]
    absolute = [one.replace("results", "/s/results").replace("runs/mine", "/s/runs/mine") for one in absolute]
    assert main(["submit", RECIPE, *absolute]) == 0


REFUSED_FOR_ITS_SIZE = (
    "Request failed with status code 500: Traceback (most recent call last):\n"
    '  File "job_head.py", line 393, in upload_package\n'
    "aiohttp.web_exceptions.HTTPRequestEntityTooLarge: Maximum request body size 104857600 exceeded.\n."
)


def test_working_directory_that_is_too_large_is_told_with_what_is_large_in_it(project, server, monkeypatch):
    (project / "data").mkdir()
    (project / "data" / "large.jsonl").write_bytes(bytes(3 << 20))
    (project / "w.safetensors").write_bytes(bytes(5 << 20))

    def refuse(**_):
        raise RuntimeError(REFUSED_FOR_ITS_SIZE)

    monkeypatch.setattr(server.client, "submit_job", refuse)
    with pytest.raises(
        JobError, match=r"than the 100 MiB that Ray takes; its largest files: data/large.jsonl \(3.0 MiB\)"
    ):
        submit._send(server, plan())


def test_run_folder_is_resumed_where_it_is_also_elsewhere(project):
    """Regression: a relative output_dir of its settings was refused with a setting that resume does not take."""
    with RunFolder.create(load_run_config(None, ["name=mine"])):
        pass
    options = make_options("runs/mine", phase="resume")
    submission = plan_submission(begun_config(Path("runs/mine")), options, here=False)
    assert submission.entrypoint == f"python -m ray_jobs.cli resume {project}/runs/mine"
