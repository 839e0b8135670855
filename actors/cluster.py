"""The Ray cluster: how a driver reaches it, which processes live there, which numbers it exports."""

import logging
import math
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, cast

import ray
from ray._private import ray_constants, services, state
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

from configs.cluster import ClusterConfig
from configs.errors import UserError, reason

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.metrics import Gauge

SHOWN = 200
PART_LOST = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""What a call raises whose actor is gone: Ray has an error of another kind where it ended it for want of memory."""


def num_restarts(actor: object) -> int:
    """How often Ray has started an actor again; 0 for one that it does not know yet. Works with one that hangs."""
    row = state.actors(_handle(actor)._actor_id.hex())
    return int(row["NumRestarts"]) if row else 0


def kill(actor: object, *, no_restart: bool = True) -> None:
    """End an actor's process, also where that does nothing any more that it is asked for."""
    ray.kill(_handle(actor), no_restart=no_restart)


def _handle(actor: object) -> "ActorHandle[object]":
    """Every actor is one of these, whatever `actors.handles` calls it."""
    return cast("ActorHandle[object]", actor)


def unmade(error: BaseException) -> str | None:
    """What an actor raised while it was made, whole and without a class of a module; None where it ended otherwise."""
    lines = _lines(error)
    return re.sub(r"^(\w+\.)+\w+: ", "", lines[-1]) if lines and _of_making(lines) else None


def reason_of(error: BaseException) -> str:
    """Why an actor died or a call failed, in one line: what it raised while it was made, else what Ray says first and
    of which class it was."""
    lines = _lines(error)
    if not lines:
        return type(error).__name__
    if _of_making(lines):
        return lines[-1][:SHOWN]
    of_class = next((f" ({line})" for line in lines if line.startswith("class_name:")), "")
    return lines[0][:SHOWN] + of_class


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(getattr(error, "cause", error)).splitlines() if line.strip()]


def _of_making(lines: Sequence[str]) -> bool:
    return "creation task" in lines[0]


WORKER_GAUGES: Mapping[str, str] = {
    "worker/policy_version": "Policy version that the worker has proven and samples with",
    "worker/running": "Groups that run on the worker",
    "worker/places": "Groups that the engine's cache allows at a time",
    "worker/kv_usage": "Of the engine's KV cache: in use",
    "worker/waiting": "Requests that wait for a place in the engine",
}
"""What rollout workers say of themselves as it happens, also where no train step ends for long."""


def gauge_name(metric: str) -> str:
    """`rollout/solve_rate` is `agentflow_rollout_solve_rate`; Prometheus sees it with Ray's own `ray_` in front."""
    return "agentflow_" + metric.replace("/", "_")


def set_gauges(values: Mapping[str, float], descriptions: Mapping[str, str], **tags: str) -> None:
    """Set a gauge for each value that is described, with these tags; they stay until set again or until the process
    ends. Every call for a metric has the same tag keys. What is not a number is left as it was."""
    for metric, value in values.items():
        if metric in descriptions and math.isfinite(value):
            _gauge(metric, descriptions[metric], tuple(tags)).set(value, tags=tags)


@cache
def _gauge(metric: str, description: str, tag_keys: tuple[str, ...]) -> "Gauge":
    from ray.util.metrics import Gauge

    return Gauge(gauge_name(metric), description, tag_keys)


WORKER_ENV = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}
"""What every process of a run has in its environment, on whatever machine."""

QUIET = WORKER_ENV | {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would run actors at the lowest priority, behind whatever else the machine does.
    "RAY_worker_niceness": "0",
}

LISTEN_PATIENCE_S = 5.0
VERSIONS_DIFFER = "Version mismatch"
"""How Ray begins where Ray or Python are others on the cluster; which ones stands in the lines after it."""


class ClusterError(UserError):
    """The run cannot join its cluster; the message says which one, why and what to do."""


def start_ray(config: ClusterConfig) -> None:
    """Join the cluster that `config` or the environment names, or start Ray on loopback with at least the two CPUs that
    actors claim. Raises ClusterError."""
    os.environ.update(QUIET)
    with _sigterm_kept():
        if address := config.joined:
            _join(address)
        else:
            _start_own(dashboard=config.dashboard)


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Whoever handles SIGTERM goes on doing so, also with one that comes while Ray starts; Ray's own handler would end
    the process without a word."""
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit as error:
        if error.code == signal.SIGTERM:
            before(signal.SIGTERM, None)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_own(*, dashboard: bool) -> None:
    """Raises ClusterError."""
    # Ray would resolve 127.0.0.1 to the machine's outward address and listen on every interface, as a cluster
    # of several machines needs; with this it stays on loopback.
    ray_constants.ENABLE_RAY_CLUSTER = False
    for last in (False, False, True):
        try:
            ray.init(
                # Without this Ray would join whatever cluster was started on this machine last.
                address="local",
                num_cpus=max(2, os.cpu_count() or 1),
                include_dashboard=dashboard,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
            )
            return
        except Exception as error:
            # Ray has no class of its own for this, and no setting for how long it waits.
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if last:
                raise ClusterError(
                    "Ray did not start within its 30 s, three times: this machine is too busy; see `uptime`, and give "
                    "the command again"
                ) from error


def stop_ray() -> None:
    """Leave the cluster; one that this run started ends with it."""
    ray.shutdown()


def _join(address: str) -> None:
    # The environment of a submitted job came with it; Ray would complain about a second one.
    submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    try:
        found = find_cluster(address)
        if not submitted and speaks_http(found):
            # Ray itself would ask it for a minute, and then end this process.
            raise ConnectionError(
                f"a web server listens at {found}, such as the dashboard; give the port of the cluster itself, which "
                "`ray start` prints (6379 where none was chosen)"
            )
        if address == "auto":
            # As Ray does: a cluster that was started here took the token up by itself. One that has none would take the
            # answers of a driver that has one for those of a stranger, so that elsewhere RAY_AUTH_MODE must say it.
            use_token()
        ray.init(
            address=found,
            runtime_env=None if submitted else {"env_vars": WORKER_ENV},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (OSError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        if VERSIONS_DIFFER in str(error):
            raise ClusterError(
                f"cannot join the Ray cluster at '{address}': {' '.join(str(error).split())}; install the cluster's "
                "versions here, or send the run there with `agentflow submit`, which runs with those of the cluster"
            ) from error
        raise ClusterError(
            f"cannot join the Ray cluster at '{address}': {str(error).partition(chr(10))[0]}; see that it runs (`ray "
            f"status --address {address}`) and, where it asks for a token, that RAY_AUTH_MODE=token is set, or start "
            "one with `ray start --head`; cluster.address=local does without"
        ) from error


def find_cluster(address: str) -> str:
    """The address, or for `auto` that of the cluster on this machine, where somebody listens. Raises OSError and
    ValueError."""
    found = services.canonicalize_bootstrap_address_or_die(address)
    check_listens(found)
    return str(found)


def use_token() -> None:
    """From now on this process shows clusters the user's Ray token, where there is one and nothing forbids it."""
    logging.getLogger(maybe_enable_token_auth_if_token_available.__module__).setLevel(logging.ERROR)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def check_listens(address: str) -> None:
    """Raises ConnectionError where nobody listens at `host:port`; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConnectionError(f"'{address}' is not of the form host:port")
    try:
        _connect(address).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"nothing listens at {address} ({reason(error)})") from error


def speaks_http(address: str) -> bool:
    """Whether a web server listens at host:port; the one of a cluster's own port closes the connection."""
    try:
        with _connect(address) as asking:
            asking.sendall(f"GET /api/version HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
            return asking.recv(5) == b"HTTP/"
    except (OSError, OverflowError, ValueError):
        return False


def _connect(address: str) -> socket.socket:
    """Raises OSError, and OverflowError and ValueError for what is no port."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=LISTEN_PATIENCE_S)
