"""A Ray cluster of nodes on this machine, each a process tree of its own, as machines are."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.faults.job import descendants, send

RAY = Path(sys.prefix) / "bin" / "ray"
PATIENCE_S = 300.0


class Machines:
    """Nodes of one cluster, each a process tree of its own, in its own session; `variables` are in their environment.
    `token_path` and Ray's log lie in `folder`, Ray's own files in `sessions`."""

    def __init__(self, folder: Path, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._folder = folder
        self.token_path = folder / "token"
        # Of a short name: Ray's sockets lie in it, and the path of one may have 107 bytes.
        self.sessions = Path(tempfile.mkdtemp(prefix="ray-"))
        self._started: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            # As on a machine whose `ray start` was given in the activated environment: jobs run its `python`.
            "PATH": f"{RAY.parent}:{os.environ['PATH']}",
            # A loaded machine takes longer than Ray waits for its processes.
            "RAY_worker_register_timeout_seconds": "600",
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
            "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "300",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
            **variables,
        }
        self.token_path.write_text("0123456789abcdef" * 4)
        self.dashboard = f"http://127.0.0.1:{free_port()}"
        self.address = ""

    def start_head(self, num_cpus: int) -> None:
        gcs = free_port()
        self._start(
            *("--head", f"--port={gcs}", f"--num-cpus={num_cpus}", "--node-ip-address=127.0.0.1"),
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1"),
            *(f"--dashboard-port={self.dashboard.rpartition(':')[2]}", f"--temp-dir={self.sessions}"),
            *(f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"),
        )
        self.address = f"127.0.0.1:{gcs}"
        deadline = time.monotonic() + PATIENCE_S
        while not listens(self.dashboard.removeprefix("http://")):
            if self._started[0].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start: {(self._folder / 'ray.log').read_text()[-4000:]}")
            time.sleep(0.1)

    def add(self, num_cpus: int) -> None:
        self._start(
            *(f"--address={self.address}", f"--num-cpus={num_cpus}", "--node-ip-address=127.0.0.1"),
            f"--dashboard-agent-listen-port={free_port()}",
        )

    def roots(self) -> list[int]:
        """The process ids of the nodes that live."""
        return [one.pid for one in self._started if one.poll() is None]

    def lose_last(self) -> None:
        """The machine that was added last goes down, with all that runs there, if it has not gone down by itself."""
        lost = self._started.pop()
        if lost.poll() is None:
            for pid in (*(one.pid for one in descendants(lost.pid)), lost.pid):
                send(pid, signal.SIGKILL)
            lost.wait()

    def processes(self) -> list[psutil.Process]:
        """All that was started here, and what that started."""
        roots = map(psutil.Process, self.roots())
        return [one for root in roots for one in (root, *root.children(recursive=True))]

    def stop(self) -> None:
        """End what was started here, and nothing else."""
        while self._started:
            self.lose_last()
        shutil.rmtree(self.sessions, ignore_errors=True)

    def _start(self, *options: str) -> None:
        command = [str(RAY), "start", "--block", "--disable-usage-stats", *options]
        with (self._folder / "ray.log").open("ab") as log:
            self._started.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            )


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as asking:
        return asking.connect_ex((host, int(port))) == 0
