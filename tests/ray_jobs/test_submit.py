"""Submitting without a cluster: what is checked, what travels, what is said of failures."""

import json
import re
import socket
import sys
from pathlib import Path

import pytest
from ray.job_submission import JobStatus
from scripted_jobs import SECRET, ScriptedClient, make_job, make_options, plan

from configs.errors import printable, visible
from configs.loading import load_run_config
from ray_jobs.checks.keys import key_variables
from ray_jobs.cli import main, make_app
from ray_jobs.jobs import client as jobs_client
from ray_jobs.jobs import submit
from ray_jobs.jobs.client import JobError
from ray_jobs.jobs.request import PHASES
from ray_jobs.jobs.submit import plan_submission
from ray_jobs.jobs.watch import job_table, run_status, run_stop, why_failed
from ray_jobs.run.begun import begun_config
from ray_jobs.run.folder import RunFolder

WRITTEN = "tvly-dev-q8Zr4Tn1Vb7Kx2Lm"
"""Of no variable, and as keys of a known service begin."""


@pytest.mark.parametrize("phase", sorted(set(PHASES) - {"resume"}))
def test_every_phase_becomes_the_command_that_it_is_locally_with_an_output_folder_that_lasts(phase, project):
    submission = plan("seed=4", phase=phase)
    command = f"python -m ray_jobs.cli {phase} recipes/mine.toml seed=4 output_dir={project}/runs"
    assert submission.entrypoint == command
    assert submission.submission_id.startswith(f"mine-{phase}-20")
    assert submission.metadata["run"] == f"{project}/runs/mine"
    assert {"phase", "recipe", "name", "version", "commit"} <= submission.metadata.keys()


def test_commit_is_told_of_code_that_travels_and_of_no_other(project):
    """Regression: a run with the code of the cluster's image named the commit of who submitted it."""
    other = plan()
    assert (other.metadata["commit"], other.metadata["version"]) == ("as on the cluster", "as on the cluster")
    assert "AGENTFLOW_COMMIT" not in other.runtime_env["env_vars"]
    root = Path(submit.__file__).parents[2]
    own = plan(working_dir=root, recipe=str(root / "configs" / "recipes" / "demo_cpu.toml"))
    assert own.metadata["commit"] == own.runtime_env["env_vars"]["AGENTFLOW_COMMIT"] != "as on the cluster"


def test_resume_names_the_run_folder_that_the_recipe_writes_to(project):
    assert plan(phase="resume").entrypoint == f"python -m ray_jobs.cli resume {project}/runs/mine"


def test_resume_of_a_run_folder_names_that_folder_whatever_the_working_directory(project):
    """Regression: a folder of this name below --working-dir was resumed."""
    (project / "code").mkdir()
    with RunFolder.create(load_run_config(None, ["name=mine"])):
        pass
    options = make_options("runs/mine", phase="resume", working_dir=Path("code"))
    assert plan_submission(begun_config(Path("runs/mine")), options, here=True).run == str(project / "runs/mine")


def test_options_of_the_phase_reach_its_command_whole():
    for text in (["--options=--benchmark gpqa --out 'a b'"], ["--options", "--benchmark gpqa --out 'a b'"]):
        _, bound, _ = make_app().parse_args(["submit", "r.toml", *text])
        assert bound.arguments["options"] == ("--benchmark", "gpqa", "--out", "a b")


def test_what_travels_leaves_caches_runs_and_weights_behind_and_takes_what_the_user_adds(project):
    added = {"pip": ["polars"], "env_vars": {"MINE": "1"}, "excludes": ["big/"]}
    runtime_env = plan(runtime_env=added).runtime_env
    assert runtime_env["working_dir"] == str(project)
    assert {".git/", ".venv/", "runs/", "*.safetensors", ".env", "big/"} <= set(runtime_env["excludes"])
    assert runtime_env["pip"] == ["polars"]
    assert runtime_env["env_vars"]["MINE"] == "1"


def test_only_phases_that_act_in_their_own_process_claim_places_for_it(project):
    on_gpu = ("rollout.engine.device=cuda", "rollout.engine.adapter_mode=native")
    assert (plan(*on_gpu, phase="train").num_cpus, plan(*on_gpu, phase="train").num_gpus) == (0, 0)
    assert (plan(*on_gpu, phase="evaluate").num_cpus, plan(*on_gpu, phase="evaluate").num_gpus) == (1, 1)
    assert plan(phase="evaluate").num_gpus == 0
    # One engine over several cards finds them only where the job has them all.
    assert plan(*on_gpu, "rollout.engine.tensor_parallel=2", phase="evaluate").num_gpus == 2
    assert plan(*on_gpu, "rollout.engine.tensor_parallel=2", "prm.device=cuda", phase="train-prm").num_gpus == 1
    # Neither plans nor judges nor a server need an engine.
    assert plan(*on_gpu, "label.type=plan", phase="label").num_gpus == 0
    assert plan(*on_gpu, "label.type=monte_carlo", phase="label").num_gpus == 1
    assert plan(*on_gpu, "backend.type=openai", "backend.model=m", phase="evaluate").num_gpus == 0


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((), ()),
        (("envs.search=tavily",), ("TAVILY_API_KEY",)),
        (("backend.type=openai", "backend.model=m", "backend.api_key_env=MY_KEY"), ("MY_KEY",)),
        (('envs.actions=["google_search", "answer"]',), ("GOOGLE_API_KEY", "GOOGLE_CSE_ID")),
        (('envs.actions=["web_search", "answer"]', "envs.web.finder=tavily"), ("TAVILY_API_KEY",)),
    ],
)
def test_a_recipe_names_its_keys_by_itself_or_by_the_tools_that_it_switches_on(overrides, named):
    assert key_variables(load_run_config(None, overrides)) == named


NEEDS_A_KEY = ("submit", "recipes/mine.toml", "envs.search=tavily")


def test_no_key_travels_and_who_must_have_it_is_said(project, server, monkeypatch, capsys):
    monkeypatch.setenv("TAVILY_API_KEY", SECRET)
    assert main(NEEDS_A_KEY) == 0
    said = capsys.readouterr()
    assert (
        "the key TAVILY_API_KEY does not travel: every machine needs TAVILY_API_KEY, or TAVILY_API_KEY_FILE" in said.out
    )
    assert SECRET not in said.out + said.err
    assert SECRET not in json.dumps(server.client.submitted)


def test_the_path_of_a_file_with_a_key_travels_and_the_file_does_not(project, server, monkeypatch, capsys):
    (project / "keys").mkdir()
    (project / "keys" / "tavily").write_text(SECRET)
    monkeypatch.setenv("TAVILY_API_KEY_FILE", "keys/tavily")
    assert main(NEEDS_A_KEY) == 0
    (sent,) = server.client.submitted
    assert sent["runtime_env"]["env_vars"]["TAVILY_API_KEY_FILE"] == f"{project}/keys/tavily"
    assert "/keys/tavily" in sent["runtime_env"]["excludes"]
    assert SECRET not in json.dumps(sent)
    assert f"every machine reads it from the file {project}/keys/tavily" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["TAVILY_API_KEY", "HF_TOKEN"])
def test_a_key_in_an_added_environment_is_refused_with_what_to_do(name, project, server, capsys):
    (project / "env.yaml").write_text(f"env_vars: {{{name}: {SECRET}}}")
    assert main([*NEEDS_A_KEY, "--runtime-env", "env.yaml"]) == 2
    said = capsys.readouterr().err
    assert f"--runtime-env holds {name}" in said
    assert f"set {name} in the environment" in said
    # Of a key that only another library reads no file is read.
    assert (f"or {name}_FILE to the path of a file" in said) == (name == "TAVILY_API_KEY")
    assert SECRET not in said
    assert server.client.submitted == []


def test_a_key_in_an_added_environment_is_refused_before_a_cluster_is_asked(project, capsys):
    (project / "env.yaml").write_text(f"env_vars: {{TAVILY_API_KEY: {SECRET}}}")
    assert main([*NEEDS_A_KEY, "--runtime-env", "env.yaml", "--address", "http://127.0.0.1:9"]) == 2
    assert "--runtime-env holds TAVILY_API_KEY" in capsys.readouterr().err


def test_a_key_of_this_environment_anywhere_in_what_is_added_is_refused(project, server, monkeypatch, capsys):
    monkeypatch.setenv("INDEX_TOKEN", SECRET)
    (project / "env.yaml").write_text(f"pip: ['--index-url=https://me:{SECRET}@packages.example/simple', polars]")
    assert main([*NEEDS_A_KEY, "--runtime-env", "env.yaml"]) == 2
    assert "--runtime-env holds INDEX_TOKEN" in capsys.readouterr().err


@pytest.mark.parametrize("argument", [f"model.path=https://h/{SECRET}", f"--options=--out {SECRET}"])
def test_a_key_of_this_environment_in_settings_or_command_is_refused(argument, project, server, monkeypatch, capsys):
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    monkeypatch.setattr(sys, "argv", ["agentflow", *NEEDS_A_KEY, argument])
    assert main([*NEEDS_A_KEY, argument]) == 2
    said = capsys.readouterr().err
    assert "hold the value of SOME_TOKEN" in said
    assert SECRET not in said


@pytest.mark.parametrize("variable", ["MY_SERVICE", "MY_SERVICE_FILE"])
@pytest.mark.parametrize("argument", [f"model.path=https://h/{SECRET}", f"--options=--out {SECRET}"])
def test_a_key_that_the_recipe_names_is_refused_wherever_it_is(
    argument, variable, project, server, monkeypatch, capsys
):
    (project / "key").write_text(SECRET)
    monkeypatch.setenv(variable, str(project / "key") if variable.endswith("_FILE") else SECRET)
    named = ("backend.type=openai", "backend.model=m", "backend.api_key_env=MY_SERVICE")
    assert main(["submit", "recipes/mine.toml", *named, argument]) == 2
    said = capsys.readouterr().err
    assert "hold the value of MY_SERVICE," in said
    assert SECRET not in said
    assert server.client.submitted == []


@pytest.mark.parametrize("argument", [f"model.path=https://h/{WRITTEN}", f"--options=--out {WRITTEN}"])
def test_what_can_only_be_a_key_is_refused_in_settings_and_options(argument, project, server, capsys):
    assert main(["submit", "recipes/mine.toml", argument]) == 2
    said = capsys.readouterr().err
    assert "the settings or the command hold a key in the word that begins with 'tvly-'" in said
    assert WRITTEN not in said
    assert server.client.submitted == []


def test_a_judge_whose_key_only_the_machines_have_is_submitted(project, server):
    judge = ("label.judge.model=m", "label.judge.api_key_env=SOME_KEY")
    assert main(["submit", "recipes/mine.toml", "label.type=judge", *judge]) == 0
    assert server.client.submitted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.toml"], "recipe 'nowhere.toml' does not exist"),
        (["recipes/mine.toml", "sede=1"], "unknown key 'sede'"),
        (["recipes/mine.toml", "envs.mix={nonsense=1}"], "unknown data set 'nonsense'"),
        (["recipes/mine.toml", "envs.data_path=gone.jsonl"], "is not in the working directory"),
        (["recipes/mine.toml", "--working-dir", "gone"], "--working-dir 'gone' is no folder"),
        (["/etc/hostname.toml"], "recipe '/etc/hostname.toml' does not exist"),
        (["recipes/mine.toml", "model.path=recipes"], "model.path = 'recipes' does not travel"),
        (["recipes/mine.toml", "reward.credit.prm_path=runs/p/prm"], "prm_path = 'runs/p/prm' does not travel"),
        (["recipes/mine.toml", "prm.model_path=recipes"], "prm.model_path = 'recipes' does not travel"),
        (["recipes/mine.toml", "cluster.address=http://h:8265"], "agentflow submit --address http://h:8265"),
        (["runs", "--phase", "resume"], "is not the folder of a run"),
        (["recipes/mine.toml", "--phase", "resume", "--options=--dry-run"], "`agentflow resume` takes no --options"),
        (["runs/mine", "num_steps=20", "--phase", "resume"], "goes on with its own settings; leave num_steps=20 out"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_sent(arguments, said, project, server, capsys):
    with RunFolder.create(load_run_config(None, ["name=mine"])):
        pass
    assert main(["submit", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert server.client.submitted == []


def test_tracker_that_only_the_cluster_has_is_submitted(project, server, monkeypatch):
    """Regression: it had to be installed where the job is sent from, too."""
    monkeypatch.setattr("ray_jobs.run.trackers.importlib.util.find_spec", lambda name: None)
    assert main(["submit", "recipes/mine.toml", 'trackers=["wandb"]']) == 0


def test_folder_of_the_name_of_the_demo_model_is_not_taken_for_it(project, server):
    (project / "demo").mkdir()
    assert main(["submit", "recipes/mine.toml", "model.path=demo"]) == 0


def test_recipe_outside_of_what_travels_is_refused(project, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "r.toml"
    elsewhere.write_text("")
    with pytest.raises(JobError, match="lies outside of the working directory"):
        plan(recipe=str(elsewhere))


def test_relative_output_folder_is_refused_where_nobody_could_find_it_again(project):
    with pytest.raises(JobError, match=r"output_dir = 'runs' is relative.*give a folder there that does"):
        plan(here=False)
    assert plan("output_dir=/mnt/runs", here=False).metadata["run"] == "/mnt/runs/mine"


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.parametrize("address", ["http://127.0.0.1:{port}", "127.0.0.1:{port}"])
def test_address_where_nobody_listens_is_said_at_once(address, project, capsys):
    address = address.format(port=free_port())
    assert main(["jobs", "--address", address]) == 2
    said = capsys.readouterr().err
    assert f"no Ray cluster at {address}: nothing listens" in said
    assert "`ray start --head" in said


def test_address_comes_from_the_flag_else_from_the_environment(project, monkeypatch):
    asked = []
    monkeypatch.setattr(jobs_client, "_dashboard_url", lambda named: asked.append(named) or named)
    monkeypatch.setattr(jobs_client, "JobSubmissionClient", lambda url: ScriptedClient())
    monkeypatch.setenv("RAY_ADDRESS", "from-ray-address:6379")
    jobs_client.connect("http://flag:8265")
    monkeypatch.setenv("RAY_ADDRESS", "from-ray-address:6379")
    jobs_client.connect(None)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://api:8265")
    jobs_client.connect(None)
    jobs_client.connect(None)
    assert asked == ["http://flag:8265", "from-ray-address:6379", "http://api:8265", "auto"]


def test_ray_client_address_is_refused_with_the_right_ones(project, capsys):
    assert main(["jobs", "logs", "j", "--address", "ray://head:10001"]) == 2
    assert "give http://host:8265, where the dashboard listens" in capsys.readouterr().err


def test_cluster_whose_agents_still_start_is_asked_again(server, project, monkeypatch):
    answers = [RuntimeError("status code 500: No available agent to submit job, please try again later."), None]
    monkeypatch.setattr(server.client, "submit_job", lambda **fields: raise_or_return(answers.pop(0)), raising=False)
    monkeypatch.setattr(submit, "ASK_AGAIN_S", 0.0)
    submit._send(server, plan())
    assert answers == []


@pytest.mark.parametrize("said", ["No available agent to submit job, please try again later.", "disk full"])
def test_cluster_that_never_takes_the_job_is_one_clear_error(server, project, monkeypatch, said):
    monkeypatch.setattr(server.client, "submit_job", lambda **_: raise_or_return(RuntimeError(said)), raising=False)
    monkeypatch.setattr(submit, "STARTS_WITHIN_S", -1.0)
    with pytest.raises(JobError, match=f"refused: {said}"):
        submit._send(server, plan())


def raise_or_return(answer):
    if isinstance(answer, Exception):
        raise answer


def test_unknown_job_is_answered_with_those_that_there_are(server, capsys):
    assert main(["jobs", "logs", "gone"]) == 2
    assert "knows no job 'gone'; the newest it knows: mine-train-1" in capsys.readouterr().err


def test_status_of_a_failed_job_ends_with_what_to_fix_and_exit_code_1(server, capsys):
    server.client.log = "start engine ...\nagentflow: error: rollout.num_threads = 9 is more than 2; set it to 2\n"
    assert run_status(None, "mine-train-1") == 1
    assert "why rollout.num_threads = 9 is more than 2; set it to 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "log", "why"),
    [
        ({}, "ModuleNotFoundError: No module named 'ray_jobs'", "submit from the project's folder"),
        ({}, "ModuleNotFoundError: No module named 'peft'", "the module 'peft' is missing on the cluster"),
        ({"driver_exit_code": -9}, "step 3", "memory runs out"),
        ({"driver_exit_code": None, "message": "pip install failed"}, "", "not get as far as its command: pip install"),
        (
            {"driver_exit_code": None, "driver_node_id": "n", "message": "Job supervisor actor died: node lost"},
            "step 3",
            "its command was lost, with its machine or with Ray's process that started it: Job supervisor actor died",
        ),
        ({"driver_exit_code": 1}, "boom\nValueError: x\n\n", "exit code 1, last line: ValueError: x"),
    ],
)
def test_failure_is_explained(fields, log, why):
    assert why in why_failed(make_job(**fields), log.splitlines())


@pytest.mark.parametrize(
    ("phase", "goes_on"),
    [
        ("train", "--phase resume` goes on with /mnt/runs/mine"),
        ("resume", "--phase resume` goes on with /mnt/runs/mine"),
        ("collect", "what it wrote is kept: the same `agentflow submit` again goes on from there"),
        ("evaluate", "what it wrote is kept: the same `agentflow submit` again goes on from there"),
    ],
)
def test_stopped_job_says_how_its_run_goes_on(server, capsys, phase, goes_on):
    server.client.known = [make_job(status=JobStatus.RUNNING, metadata={"run": "/mnt/runs/mine", "phase": phase})]
    assert run_stop(None, "mine-train-1") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "mine-train-1: stopped" in said
    assert goes_on in said


def test_log_cannot_command_the_terminal():
    assert printable("a\x1b[31mred\x1b]0;title\x07b\rc\n\td") == "ared]0;titlebc\n\td"
    assert visible("a\x1b[31mred\x9b\nb\u82f9") == r"a\x1b[31mred\x9b\nb\u82f9".replace(r"\u82f9", "\u82f9")


@pytest.mark.parametrize("named", [None, "\x1b]0;evil\x07job"])
def test_what_others_called_their_jobs_commands_no_terminal(named, server, monkeypatch, capsys):
    """Regression: whoever may submit a job could write escape sequences to the terminal of who looks at it."""
    monkeypatch.setenv("COLUMNS", "200")
    evil = "\x1b]0;evil\x07[red]"
    job = make_job(
        submission_id="\x1b]0;evil\x07job",
        entrypoint=f"python {evil}.py",
        metadata={"recipe": evil, f"key{evil}": evil, "run": f"/{evil}"},
        status=JobStatus.STOPPED,
    )
    server.client.known = [job]
    run_status("http://here:8265", named)
    if named:
        run_stop("http://here:8265", named)
    said = capsys.readouterr().out
    assert r"\x1b]0;evil\x07[red]" in said
    assert r"\x1b]0;evil\x07job" in said
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)


def test_job_table_shows_metadata_and_nothing_of_the_environment():
    table = job_table(make_job(metadata={"commit": "abc"}, runtime_env={"env_vars": {"K": SECRET}}))
    cells = [str(cell) for column in table.columns for cell in column._cells]
    assert "abc" in cells
    assert not any(SECRET in cell for cell in cells)
