"""Submitting without a cluster: the command of the job, what is uploaded, keys, and following the log."""

import json
from pathlib import Path

import pytest
import requests
from ray._private.runtime_env.packaging import _get_excludes
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus
from scripted_jobs import SECRET, ScriptedClient, job_for

from configs.errors import UserError
from configs.loading import load_run_config
from ray_jobs import submit
from ray_jobs.cli import main
from ray_jobs.run.preflight import key_variables
from ray_jobs.submit import follow_job
from ray_jobs.travel import travelling

WRITTEN_KEY = "tvly-dev-q8Zr4Tn1Vb7Kx2Lm"
"""A key of no variable, recognised by its first letters."""
NEEDS_A_KEY = ("submit", "recipes/mine.toml", "envs.search=tavily")
ON_GPU = ("rollout.engine.device=cuda", "rollout.engine.adapter_mode=native")


@pytest.mark.parametrize("phase", ["train", "train-prm", "evaluate"])
def test_phase_runs_the_local_command_with_an_absolute_output_folder(phase, project):
    job = job_for("seed=4", phase=phase)
    assert job["entrypoint"] == f"python -m ray_jobs.cli {phase} recipes/mine.toml seed=4 output_dir={project}/runs"
    assert job["submission_id"].startswith(f"mine-{phase}-20")
    assert job["metadata"]["run"] == f"{project}/runs/mine"


def test_on_another_machine_the_output_folder_is_absolute_and_resume_names_the_run_folder(project):
    with pytest.raises(UserError, match="output_dir"):
        job_for(here=False)
    job = job_for("output_dir=/mnt/runs", "cluster.patience_s=9", phase="resume", here=False)
    assert job["entrypoint"] == "python -m ray_jobs.cli resume /mnt/runs/mine cluster.patience_s=9"
    assert job["metadata"]["run"] == "/mnt/runs/mine"


@pytest.mark.parametrize(
    ("phase", "overrides", "claims"),
    [
        ("train", ON_GPU, (0, 0)),
        ("evaluate", ON_GPU, (1, 1)),
        ("evaluate", (*ON_GPU, "rollout.engine.tensor_parallel=2"), (1, 2)),
        ("evaluate", (*ON_GPU, "backend.type=openai", "backend.model=m"), (1, 0)),
        ("train-prm", ON_GPU, (1, 1)),
        ("train-prm", ("prm.device=cuda",), (1, 1)),
    ],
)
def test_phases_that_sample_in_the_driver_claim_its_cpu_and_cards(phase, overrides, claims, project):
    job = job_for(*overrides, phase=phase)
    assert (job["entrypoint_num_cpus"], job["entrypoint_num_gpus"]) == claims


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ((), ()),
        (("envs.search=tavily",), ("TAVILY_API_KEY",)),
        (("backend.type=openai", "backend.model=m", "backend.api_key_env=MY_KEY"), ("MY_KEY",)),
        (('envs.actions=["web_search", "answer"]', "envs.web.finder=tavily"), ("TAVILY_API_KEY",)),
    ],
)
def test_recipe_names_the_keys_of_its_settings_and_tools(overrides, names):
    assert key_variables(load_run_config(None, overrides)) == names


# --- secrets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_file", [False, True])
def test_key_is_not_sent_but_the_path_of_its_file(project, server, monkeypatch, capsys, in_file):
    if in_file:
        (project / "key").write_text(SECRET)
    monkeypatch.setenv("TAVILY_API_KEY_FILE" if in_file else "TAVILY_API_KEY", "key" if in_file else SECRET)
    assert main(NEEDS_A_KEY) == 0
    output, (sent,) = capsys.readouterr(), server.submitted
    assert "TAVILY_API_KEY is not sent" in output.out
    assert SECRET not in output.out + output.err + json.dumps(server.submitted)
    assert sent["runtime_env"]["env_vars"].get("TAVILY_API_KEY_FILE") == (f"{project}/key" if in_file else None)
    assert ("/key" in sent["runtime_env"]["excludes"]) == in_file


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"env_vars: {{TAVILY_API_KEY: {SECRET}}}", "TAVILY_API_KEY"),
        (f"env_vars: {{HF_TOKEN: {SECRET}}}", "HF_TOKEN"),
        (f"pip: ['--index-url=https://me:{SECRET}@packages.example/simple', polars]", "INDEX_TOKEN"),
        ("pip: ['--index-url=https://me:hunter2@packages.example/simple']", "user part of a URL"),
        ("pip: indexed.txt", "user part of a URL"),
        ("pip: {packages: indexed.txt}", "user part of a URL"),
        ("env_vars: {MINE: sk-0123456789abcdef}", "sk-"),
        ("working_dir: /x", "working_dir"),
    ],
)
def test_runtime_environment_with_a_key_or_a_wrong_entry_is_rejected(text, error, project, server, monkeypatch, capsys):
    monkeypatch.setenv("INDEX_TOKEN", SECRET) if error == "INDEX_TOKEN" else None
    (project / "env.yaml").write_text(text)
    (project / "indexed.txt").write_text("--index-url https://me:hunter2@packages.example/simple\npolars\n")
    assert main([*NEEDS_A_KEY, "--runtime-env", "env.yaml"]) == 2
    line = capsys.readouterr().err
    assert error in line
    assert not any(key in line for key in (SECRET, "hunter2", "0123456789"))
    assert server.submitted == []


@pytest.mark.parametrize("variable", ["SOME_TOKEN", "MY_SERVICE", "MY_SERVICE_FILE", None])
@pytest.mark.parametrize("argument", ["model.path=https://h/{}", "--options=--out {}"])
def test_key_in_settings_or_options_is_rejected(argument, variable, project, server, monkeypatch, capsys):
    """The key of a variable with a secret's name, of one that the recipe names, of its file, or one of a known form."""
    key = SECRET if variable else WRITTEN_KEY
    (project / "key").write_text(key)
    if variable:
        monkeypatch.setenv(variable, str(project / "key") if variable.endswith("_FILE") else key)
    named = ("backend.type=openai", "backend.model=m", "backend.api_key_env=MY_SERVICE")
    assert main(["submit", "recipes/mine.toml", *named, argument.format(key)]) == 2
    assert key not in capsys.readouterr().err
    assert server.submitted == []


def test_pattern_of_the_user_cannot_include_secrets_or_weights(project):
    (project / "src").mkdir()
    for name in ("code.py", ".env", "tls.pem", "w.safetensors"):
        (project / "src" / name).write_text(SECRET)
    (project / "env.yaml").write_text("excludes: ['!src/.env', '!src/*.pem', '!*.safetensors', 'env.yaml', 'recipes']")
    excludes = job_for(runtime_env=Path("env.yaml"))["runtime_env"]["excludes"]
    assert {file.name for file in travelling(project, excludes)} == {"code.py"}


def test_key_file_is_excluded_however_its_path_reaches_the_folder(project, tmp_path_factory, monkeypatch):
    """The path may have a link in it, and the name may have characters of patterns."""
    link = tmp_path_factory.mktemp("links") / "home"
    link.symlink_to(project)
    (project / "keys").mkdir()
    for name, variable in (("a", "TAVILY_API_KEY"), ("b [1]!", "OTHER_API_KEY"), ("c", "THIRD_TOKEN")):
        (project / "keys" / name).write_text(SECRET)
        monkeypatch.setenv(f"{variable}_FILE", f"{link}/keys/{name}")
    (project / "keys" / "notes").write_text("")
    excludes = job_for("envs.search=tavily")["runtime_env"]["excludes"]
    assert {file.name for file in travelling(project, excludes)} == {"mine.toml", "notes"}
    assert _get_excludes(project, excludes)(project / "keys" / "a")


# --- rejected before anything is sent -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["../outside.toml"], "--working-dir"),
        (["recipes/mine.toml", "agent.memory.type=folder", "agent.memory.path=hints"], "agent.memory.path"),
        (["recipes/mine.toml", "--phase", "evaluate", "--options=--out results"], "--out"),
    ],
)
def test_request_that_cannot_work_is_rejected(arguments, named, project, server, capsys):
    (project.parent / "outside.toml").write_text("")
    assert main(["submit", *arguments]) == 2
    assert named in capsys.readouterr().err
    assert server.submitted == []


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (AuthenticationError("no"), "get-auth-token"),
        (requests.exceptions.ConnectionError("http://me:hunter2@h refused"), "--address"),
        (
            RuntimeError('failed: Traceback (most recent call last):\n  File "x"\nValueError: mine exists\n.'),
            "mine exists",
        ),
    ],
)
def test_error_of_the_job_server_is_one_line_without_a_password(error, part, project, server, monkeypatch, capsys):
    def fail(**_):
        raise error

    monkeypatch.setattr(server, "submit_job", fail)
    assert main(["submit", "recipes/mine.toml"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert part in line
    assert "hunter2" not in line


# --- following ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "code"), [(JobStatus.SUCCEEDED, 0), (JobStatus.FAILED, 1), (JobStatus.STOPPED, 1)])
def test_log_is_printed_without_terminal_codes_until_the_job_ends(monkeypatch, capsys, last, code):
    monkeypatch.setattr(submit, "POLL_S", 0.0)
    client = ScriptedClient([JobStatus.RUNNING, last], ["one\ntw", "o\nthree \x1b[2J\n"])
    assert follow_job(client, "mine") == code
    assert "one\ntwo\nthree \n" in capsys.readouterr().out
