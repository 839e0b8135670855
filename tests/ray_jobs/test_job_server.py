"""What is told of a job server that is not there, is another one, or refuses; and of jobs that wait or are lost."""

import http.server
import json
import os
import threading
from types import SimpleNamespace

import pytest
import requests
from ray.job_submission import JobStatus
from ray_jobs.jobs import client as jobs_client
from ray_jobs.jobs.client import JobError, JobServer, connect
from ray_jobs.jobs.watch import follow, run_status, run_stop
from scripted_jobs import ScriptedClient, make_job, plan

from ray_jobs import submit, watch
from ray_jobs.cli import main

OF_RAY = (200, {"version": "4", "ray_version": "2.60.0", "ray_commit": "c", "session_name": "session_elsewhere"})


@pytest.fixture
def web():
    """A web server on loopback that gives every question `web.answer`, and counts them."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.asked += 1
            status, value = seen.answer
            text = value if isinstance(value, str) else json.dumps(value)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    seen = SimpleNamespace(answer=OF_RAY, asked=0, address=f"127.0.0.1:{listening.server_port}")
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield seen
    listening.shutdown()
    listening.server_close()


@pytest.fixture(autouse=True)
def _no_proxy_and_no_wait(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org")
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.0)


def test_dashboard_is_found_with_and_without_its_scheme(web):
    """Regression: without it the cluster's own port was asked for the dashboard, where there is none."""
    for named in (web.address, f"http://{web.address}", f"http://{web.address}/#/jobs"):
        assert connect(named).url == f"http://{web.address}"


@pytest.mark.parametrize("answer", [(200, "<html>Grafana</html>"), (404, "not here"), (200, {"version": "4"})])
def test_web_server_that_is_no_job_server_is_told_from_one(web, answer):
    web.answer = answer
    with pytest.raises(JobError, match=r"is no job server of Ray \(.*\); give http://host:8265, where the dashboard"):
        connect(f"http://{web.address}")


def test_proxy_of_the_environment_is_not_asked_for_what_listens_here(web, monkeypatch):
    """Regression: it was, and had no answer."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert connect(f"http://{web.address}").url == f"http://{web.address}"
    assert os.environ["no_proxy"] == "example.org,127.0.0.1"


@pytest.mark.parametrize(("status", "said"), [(502, r"does not answer \(502 "), (403, "asks for a token")])
def test_proxy_that_does_not_let_us_through_is_named(web, monkeypatch, status, said):
    web.answer = (status, "no")
    monkeypatch.setenv("http_proxy", f"http://{web.address}")
    with pytest.raises(JobError, match=rf"{said}.*proxy of the environment; to go without, add head.example to NO_"):
        connect("http://head.example:8265")


def test_password_in_an_address_is_printed_nowhere(web, project, capsys):
    address = f"http://me:hunter2@{web.address}"
    assert main(["jobs", "--address", address]) == 2  # it lists no jobs
    web.answer = (403, "Forbidden")
    assert main(["jobs", "--address", address]) == 2
    assert main(["jobs", "--address", "http://me:hunter2@127.0.0.1:9"]) == 2
    said = capsys.readouterr()
    assert web.address in said.err
    assert "hunter2" not in said.out + said.err


def test_tunnel_to_a_cluster_is_not_taken_for_a_cluster_on_this_machine(web, project, tmp_path, monkeypatch, capsys):
    """Regression: a relative output_dir became a folder of this machine, on a head node that does not have it."""
    assert not connect(f"http://{web.address}").is_here
    assert main(["submit", "recipes/mine.toml", "--address", f"http://{web.address}"]) == 2
    assert "output_dir = 'runs' is relative" in capsys.readouterr().err
    (tmp_path / "session_elsewhere").mkdir()
    words = ["--session-name=session_elsewhere", f"--session-dir={tmp_path}/session_elsewhere"]
    lines = [None, [], ["/ray/raylet", *words]]
    monkeypatch.setattr(
        jobs_client.psutil, "process_iter", lambda _: [SimpleNamespace(info={"cmdline": line}) for line in lines]
    )
    # A worker of the cluster is not its head.
    assert not connect(f"http://{web.address}").is_here
    lines.append(["/ray/gcs_server", *words])
    assert connect(f"http://{web.address}").is_here
    # In a container that publishes its port here.
    (tmp_path / "session_elsewhere").rmdir()
    assert not connect(f"http://{web.address}").is_here


SAID_BY_RAY = (
    "Request failed with status code 500: Traceback (most recent call last):\n"
    '  File "job_head.py", line 419, in submit_job\n'
    "    resp = await job_agent_client.submit_job_internal(submit_request)\n"
    "ValueError: Job with submission_id mine already exists. Please use a different submission_id.\n."
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(SAID_BY_RAY), "refused: ValueError: Job with submission_id mine already exists. Please use a"),
        (TypeError("runtime_env['pip'] must be a list"), r"refused: runtime_env\['pip'\] must be a list"),
    ],
)
def test_refusal_is_told_in_its_own_words(server, project, monkeypatch, error, said):
    """Regression: of a server's traceback the first line was told, which says nothing."""

    def refuse(**_):
        raise error

    monkeypatch.setattr(server.client, "submit_job", refuse)
    with pytest.raises(JobError, match=said):
        submit._send(server, plan())


WAITS = "Job has not started yet. It may be waiting for resources (CPUs, GPUs, ...) to become available."


class Streams(ScriptedClient):
    """A job whose log comes in streams, each of which begins with the log and may break off; `states` are told one
    after the other, the last one for ever."""

    def __init__(self, states, streams=(), **fields):
        super().__init__(make_job(**fields))
        self.states = list(states)
        self.streams = list(streams)

    def list_jobs(self):
        status = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(status, Exception):
            raise status
        return [job.model_copy(update={"status": status}) for job in self.known]

    async def tail_job_logs(self, name):
        for chunk in self.streams.pop(0) if self.streams else ():
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk


def followed(client):
    return follow(JobServer("http://127.0.0.1:8265", client), "mine-train-1")


def test_log_goes_on_where_its_stream_broke_off(capsys):
    """Regression: the reader was told that the server refused, or that the job runs, and left with exit code 1."""
    states = [JobStatus.RUNNING, JobStatus.RUNNING, JobStatus.RUNNING, JobStatus.SUCCEEDED]
    broken = RuntimeError("WebSocket connection closed unexpectedly with close code 1006")
    streams = [["one\ntw", broken], ["one\n", "two\n"], ["one\ntwo\nthree\n"]]
    assert followed(Streams(states, streams)) == 0
    said = capsys.readouterr().out
    assert said.replace(f"the stream of its log broke off: {broken}\n", "") == (
        "one\ntwo\nthree\nmine-train-1: succeeded\n"
    )


def test_a_server_that_is_away_for_a_moment_is_asked_again(capsys):
    """Regression: a tunnel that broke off ended the command with an error, and the job succeeded."""
    away = requests.exceptions.ConnectionError("Connection refused")
    states = [JobStatus.RUNNING, away, away, JobStatus.RUNNING, JobStatus.SUCCEEDED]
    assert followed(Streams(states, [["one\n", RuntimeError("lost")], ["one\ntwo\n"]])) == 0
    said = capsys.readouterr().out
    assert [said.count(line) for line in ("one\n", "two\n", "does not answer", "asked for again")] == [1, 1, 1, 1]


def test_a_server_that_stays_away_ends_the_command(monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE_S", 0.0)
    with pytest.raises(JobError, match="does not answer"):
        followed(Streams([requests.exceptions.ConnectionError("Connection refused")]))


def test_job_that_waits_for_room_says_so_once_while_it_is_followed(capsys):
    states = [*[JobStatus.PENDING] * 3, JobStatus.RUNNING, JobStatus.SUCCEEDED]
    assert followed(Streams(states, [["one\n"]], message=WAITS)) == 0
    assert capsys.readouterr().out == f"mine-train-1 is pending: {WAITS}\none\nmine-train-1: succeeded\n"


def test_state_of_a_job_that_waits_says_for_what(server, capsys):
    server.client.known = [make_job(status=JobStatus.PENDING, message=WAITS, driver_exit_code=None)]
    assert run_status(None, "mine-train-1") == 0
    assert "waiting for resources" in " ".join(capsys.readouterr().out.split())


def test_job_that_waits_for_room_cannot_be_stopped_and_says_when_it_ends(server, monkeypatch):
    """Regression: `agentflow jobs` was to tell, and told nothing."""
    server.client.known = [make_job(status=JobStatus.PENDING, message=WAITS, driver_exit_code=None)]
    monkeypatch.setattr(server.client, "stop_job", lambda name: True)
    monkeypatch.setattr(watch, "STOP_PATIENCE_S", -1.0)
    with pytest.raises(JobError, match=r"has not begun \(Job has not started yet.*it ends when it would begin"):
        run_stop(None, "mine-train-1")


def test_job_whose_machine_is_lost_keeps_its_reason_though_its_log_is_gone(server, capsys, monkeypatch):
    """Regression: of such a job only the server's error was told."""
    lost = {"driver_exit_code": None, "driver_node_id": "n", "message": "Job supervisor actor died: its node died"}
    server.client.known = [make_job(metadata={"phase": "train", "run": "/mnt/runs/mine"}, **lost)]

    def gone(name):
        raise RuntimeError(SAID_BY_RAY)

    monkeypatch.setattr(server.client, "get_job_logs", gone)
    assert run_status(None, "mine-train-1") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "its log cannot be read: http://127.0.0.1:8265 refused: ValueError" in said
    assert "its command was lost, with its machine" in said
    assert "--phase resume` goes on with /mnt/runs/mine" in said


@pytest.mark.parametrize(
    ("recipe", "command"),
    [
        ("recipes/mine.toml", "submit recipes/mine.toml name=job output_dir=/mnt/runs --phase resume`"),
        ("runs/job", "submit runs/job --phase resume`"),
    ],
)
def test_stopped_job_names_the_command_that_resumes_its_run(server, project, capsys, recipe, command):
    """Regression: the recipe alone names the run that it says, and not the one that was stopped."""
    (project / "runs" / "job").mkdir(parents=True)
    facts = {"run": "/mnt/runs/job", "phase": "train", "recipe": recipe}
    server.client.known = [make_job(status=JobStatus.RUNNING, metadata=facts)]
    assert run_stop(None, "mine-train-1") == 0
    assert command in " ".join(capsys.readouterr().out.split())
