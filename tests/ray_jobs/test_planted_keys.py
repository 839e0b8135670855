"""Keys that are planted in the environment of the machines, and then looked for in all that jobs write, print and
answer: after a job that ends, one that fails and one that crashes."""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from mcp_processes import started
from ray.job_submission import JobStatus, JobSubmissionClient
from stage import steps_of, wait_until

from ray_jobs import submit
from ray_jobs.cli import main
from tests.faults.machines import Machines
from tests.ray_jobs.planted_keys import KEYED, ROOT, SERVER, SMALL, keyed_tools, plant, viewer_answers

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

RECIPE = "configs/recipes/prm_cpu.toml"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return plant(random.Random(time.time_ns()), tmp_path_factory.mktemp("keys") / "own")


@pytest.fixture(scope="module")
def pages():
    with started([sys.executable, str(SERVER), "hostile_pages"]) as url:
        yield url


def test_submitted_jobs_leak_no_key(keys, pages, tmp_path, monkeypatch, capsys, ray_token):
    machines = Machines(tmp_path, keys.variables)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(submit, "COMMAND", KEYED)
    ray_token(machines.token_path)
    # The submitting process has the keys too.
    for name, value in keys.variables.items():
        monkeypatch.setenv(name, value)
    said = []
    # The checkout's tests stay behind, but for what the command needs.
    travels = tmp_path / "travels.yaml"
    needed = ["!/tests/", "/tests/*/", "!/tests/ray_jobs/", "/tests/ray_jobs/*", "!/tests/ray_jobs/keyed_agentflow.py"]
    travels.write_text(json.dumps({"excludes": needed}))

    def agentflow(*arguments):
        code = main([*arguments, "--address", machines.dashboard])
        output = capsys.readouterr()
        said.append(output.out + output.err)
        return code, said[-1]

    def submit_train(name, *more):
        settings = (RECIPE, f"name={name}", f"output_dir={tmp_path}/runs", *SMALL, *keyed_tools(pages))
        code, output = agentflow("submit", *settings, "--phase", "train", "--runtime-env", str(travels), *more)
        submitted = re.search(r"submitted ([^\s:]+)", output)
        assert submitted, output
        return code, submitted[1]

    try:
        machines.start_head(num_cpus=2)
        assert submit_train("ended", "num_steps=2", "--follow")[0] == 0, said[-1]
        assert submit_train("failed", "num_steps=2", "output_dir=/proc/nowhere", "--follow")[0] == 1
        crashed = submit_train("crashed", "num_steps=1000")[1]
        wait_until(lambda: len(steps_of(tmp_path / "runs" / "crashed")) >= 1)
        end_abruptly(machines, "RolloutWorker")
        end_abruptly(machines, "keyed_agentflow")
        client = JobSubmissionClient(machines.dashboard)
        wait_until(lambda: client.get_job_status(crashed) == JobStatus.FAILED)
        said.append(client.get_job_logs(crashed))
        jobs = json.dumps([job.model_dump(mode="json") for job in client.list_jobs()])

        for name in ("ended", "crashed"):
            run = tmp_path / "runs" / name
            # The tools were called, had their keys and quoted them.
            assert "[key] the MCP server" in (run / "trajectories.jsonl").read_text()
            assert keys.found_in(viewer_answers(run)) == []
        assert (tmp_path / "runs" / "ended" / "report.html").exists()
        assert list(machines.sessions.rglob("runtime_env_agent.log"))
        assert keys.found_below([tmp_path, machines.sessions]) == []
        assert keys.found_in("".join([*said, jobs]).encode()) == []
    finally:
        machines.stop()


REAL = ("python", "-m", "ray_jobs.cli")


@pytest.mark.parametrize(("command", "num_steps"), [(KEYED, 1), (REAL, 0)], ids=["simulated", "real"])
def test_local_runs_leak_no_key(command, num_steps, keys, pages, tmp_path):
    """Once to its end, and once killed with all its processes while it rolls out. The real model never solves a task
    with pages that only quote keys, and so makes no train step."""
    with tempfile.TemporaryDirectory(prefix="ray-") as sessions:
        begin = partial(begin_training, command, pages, tmp_path, keys.variables | {"RAY_TMPDIR": sessions})
        assert begin("ended", num_steps=num_steps).wait(1800) == 0, (tmp_path / "ended.log").read_text()[-4000:]
        crashed = begin("crashed", num_steps=1000)
        try:
            wait_until(lambda: waits_for_groups(tmp_path / "crashed.log") or crashed.poll() is not None)
            assert crashed.poll() is None, (tmp_path / "crashed.log").read_text()[-4000:]
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in [*psutil.Process(crashed.pid).children(recursive=True), crashed]:
                    one.kill()
            crashed.wait()
        for name in ("ended", "crashed"):
            assert keys.found_in(viewer_answers(tmp_path / name)) == []
        assert list(Path(sessions).rglob("raylet.out"))
        assert keys.found_below([tmp_path, Path(sessions)]) == []


def waits_for_groups(log):
    """Whether RL has sampled for a while, or has made a train step."""
    said = log.read_text()
    return "the groups of step 1" in said or "reinforce 1/" in said


def begin_training(command, pages, folder, variables, name, *, num_steps):
    settings = (RECIPE, f"name={name}", f"num_steps={num_steps}", f"output_dir={folder}", *SMALL, *keyed_tools(pages))
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command[1:], "train", *settings],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def test_key_search_finds_a_key(keys, tmp_path):
    (tmp_path / "some.log").write_text(f"x{keys.values['URL_KEY']}x")
    assert keys.found_below([tmp_path]) == [f"{tmp_path / 'some.log'}: URL_KEY"]


def end_abruptly(machines, name):
    """Kill the processes whose command line holds the name."""
    killed = 0
    for one in machines.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(name in word for word in one.cmdline()):
                one.kill()
                killed += 1
    assert killed, name
