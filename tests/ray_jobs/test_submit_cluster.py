"""A cluster as a user starts it, a run submitted to it from another process: watched, joined by a machine that comes
while it runs, stopped, resumed. Engine and learner are simulated, everything else is real."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from ray._private.authentication_test_utils import reset_auth_token_state
from ray.util.state import list_nodes
from stage import check_nothing_lost, groups_of, steps_of, wait_until

from ray_jobs import submit
from ray_jobs.cli import main

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

ROOT = Path(__file__).parents[2]
RAY = Path(sys.prefix) / "bin" / "ray"
JOIN_S = 30.0
"""A machine that joins is put to use within that."""

NUM_STEPS = 160
"""Of half a second each: there must be some left when the second machine has come and the run is stopped."""

RUN = (
    *("configs/recipes/demo_cpu.toml", "name=job", f"num_steps={NUM_STEPS}", "batch_groups=2", "pipeline_depth=2"),
    *("max_staleness=1000", "max_empty_batches=1000", "rollout.group_size=4", "rollout.max_workers=2"),
    *("rollout.engine.max_num_seqs=8", "rollout.engine.num_threads=1", "learner.num_threads=1"),
    *("learner.checkpoint_every=2", "cold_start.num_demonstrations=0", "evaluation.num_tasks=2"),
    *("evaluation.num_untouched_tasks=1", "reward.credit=outcome", "cluster.patience_s=300"),
)


class Machines:
    """Nodes of one cluster on this machine, each a process tree of its own, in its own session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sessions = tempfile.mkdtemp(prefix="ray-")
        """Of a short name: Ray's sockets lie in it, and the path of one may have 107 bytes."""
        self._started: list[subprocess.Popen[bytes]] = []
        self._env = {
            **os.environ,
            # A loaded machine takes longer than Ray waits for its processes.
            "RAY_worker_register_timeout_seconds": "600",
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
            "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "300",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        }
        (folder / "token").write_text("0123456789abcdef" * 4)
        self.dashboard = f"http://127.0.0.1:{free_port()}"
        self.address = ""

    def start_head(self, num_cpus: int) -> None:
        gcs = free_port()
        self._start(
            *("--head", f"--port={gcs}", f"--num-cpus={num_cpus}", "--node-ip-address=127.0.0.1"),
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1"),
            *(f"--dashboard-port={self.dashboard.rpartition(':')[2]}", f"--temp-dir={self._sessions}"),
            *(f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"),
        )
        self.address = f"127.0.0.1:{gcs}"
        wait_until(lambda: listens(self.dashboard.removeprefix("http://")) or self._started[0].poll() is not None)
        assert self._started[0].poll() is None, (self._folder / "ray.log").read_text()

    def add(self, num_cpus: int, *, without: Path) -> None:
        """Another machine, on which this folder does not exist."""
        self._start(
            *(f"--address={self.address}", f"--num-cpus={num_cpus}", "--node-ip-address=127.0.0.1"),
            f"--dashboard-agent-listen-port={free_port()}",
            within=("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{without}" && exec "$@"', "sh"),
        )

    def num_alive(self) -> int:
        return sum(node.state == "ALIVE" for node in list_nodes(address=self.dashboard))

    def stop(self) -> None:
        """End what was started here, and nothing else."""
        for process in reversed(self._started):
            tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for one in tree:
                one.kill()
            process.wait()
        shutil.rmtree(self._sessions, ignore_errors=True)

    def _start(self, *options: str, within: tuple[str, ...] = ()) -> None:
        command = [*within, str(RAY), "start", "--block", "--disable-usage-stats", *options]
        with (self._folder / "ray.log").open("ab") as log:
            self._started.append(
                subprocess.Popen(command, env=self._env, stdout=log, stderr=log, start_new_session=True, cwd=ROOT)
            )


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    machines = Machines(tmp_path_factory.mktemp("cluster"))
    try:
        machines.start_head(num_cpus=2)
        yield machines
    finally:
        machines.stop()
        # This process keeps the first token that it saw: with it the tests to come could not start a Ray of their own.
        reset_auth_token_state()


@pytest.fixture
def agentflow(machines, monkeypatch, capsys):
    """Runs `agentflow` as a user would, in the project's folder; returns the exit code and what it printed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(submit, "COMMAND", ("python", "tests/ray_jobs/simulated_agentflow.py"))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # what Ray took from it at its import stands, whatever it is now
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(machines._folder / "token"))

    def run(*arguments):
        code = main([*arguments, "--address", machines.dashboard])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_run_is_submitted_joined_by_a_machine_stopped_and_resumed(machines, agentflow, tmp_path):
    if shutil.which("unshare") is None or not may_mount():
        pytest.skip("a machine that does not see the run folder needs `unshare --mount`: run as root, with util-linux")
    folder = tmp_path / "runs" / "job"
    code, said = agentflow("submit", *RUN, f"output_dir={tmp_path}/runs", "--phase", "train")
    assert code == 0, said
    job = re.search(r"submitted (\S+)", said)[1]
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(steps_of(folder)) >= 2)
    assert "running" in agentflow("status", job)[1]

    added = time.monotonic()
    machines.add(num_cpus=1, without=tmp_path / "runs")
    wait_until(lambda: machines.num_alive() == 2)
    joined = time.monotonic()
    wait_until(lambda: worked(folder, 1))
    used_after = time.monotonic() - joined
    print(f"a machine started in {joined - added:.1f} s and was used {used_after:.1f} s later")
    assert used_after < JOIN_S

    code, said = agentflow("stop", job)
    assert code == 0
    assert "stopped" in said
    before = len(steps_of(folder))
    assert before < NUM_STEPS

    code, said = agentflow("submit", *RUN, f"output_dir={tmp_path}/runs", "--phase", "resume", "--follow")
    assert code == 0, said
    assert "report:" in said
    assert steps_of(folder) == list(range(1, NUM_STEPS + 1))
    assert check_nothing_lost(folder).trained == 2 * NUM_STEPS
    assert "stopped" in agentflow("status")[1]


def test_job_that_fails_says_what_to_fix(agentflow):
    code, said = agentflow("submit", *RUN, "output_dir=/proc/nowhere", "--phase", "train", "--follow")
    assert code == 1
    assert "cannot write '/proc/nowhere/job': No such file or directory" in said
    assert "set output_dir=... to another disk" in said


def worked(folder, worker):
    return any(row["worker"] == worker for row in groups_of(folder))


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def listens(address):
    host, _, port = address.rpartition(":")
    with socket.socket() as asking:
        return asking.connect_ex((host, int(port))) == 0


def may_mount():
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
