"""The Ray cluster of a run: joining or starting it, the errors of its parts, and the gauges that it exports."""

import logging
import math
import os
import re
import signal
import socket
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

import ray
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.util.metrics import Gauge

from configs.api_keys import without_secrets
from configs.errors import UserError
from configs.run import ClusterConfig

Handle: TypeAlias = Any
"""A handle of a Ray actor: Ray makes its methods at run time."""

PART_LOST = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""Errors of a call whose actor is gone; Ray raises the second one if it killed the actor for want of memory."""

MAX_REASON = 300
_gauge = cache(Gauge)


class LearnerLostError(RuntimeError):
    """The learner was lost, with its weights since the newest checkpoint."""


class CutOffError(UserError):
    """An error that ends a run, after which it can be resumed; the command for it is added to the message."""


def is_lost(error: Exception) -> bool:
    """Return whether a call failed because its actor is gone, and not because that actor called another one that is."""
    return isinstance(error, PART_LOST) and not isinstance(error, ray.exceptions.RayTaskError)


def reason_of(error: BaseException) -> str:
    """Return why an actor died or a call failed, in one line."""
    text = without_secrets(str(getattr(error, "cause", error)))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if "creation task" in lines[0]:
        # The constructor raised: its error is the last line of the traceback, after the name of its class.
        return re.sub(r"^(\w+\.)+(\w+: )", r"\2", lines[-1])[:MAX_REASON]
    class_name = next((f" ({line})" for line in lines if line.startswith("class_name:")), "")
    return lines[0][:MAX_REASON] + class_name


WORKER_GAUGES: Mapping[str, str] = {
    "worker/policy_version": "Policy version that the worker has proven and samples with",
    "worker/running": "Groups that run on the worker",
    "worker/places": "Groups that the engine's cache allows at a time",
    "worker/kv_usage": "Of the engine's KV cache: in use",
    "worker/waiting": "Requests that wait for a place in the engine",
}
"""Gauges of the rollout workers, which change also while no train step ends."""


def gauge_name(metric: str) -> str:
    """Return the name of a gauge; Ray puts `ray_` in front of it. Example: `agentflow_rollout_solve_rate`."""
    return "agentflow_" + metric.replace("/", "_")


def set_gauges(values: Mapping[str, float], descriptions: Mapping[str, str], **tags: str) -> None:
    """Set a gauge, always with the same tag keys, for each finite value that has a description."""
    for metric, value in values.items():
        if metric in descriptions and math.isfinite(value):
            _gauge(gauge_name(metric), descriptions[metric], tuple(tags)).set(value, tags=tags)


WORKER_ENV = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}
"""Environment of every process of a run, on every machine."""

# By default Ray runs actors at the lowest priority of the machine.
QUIET = {**WORKER_ENV, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


def start_ray(config: ClusterConfig) -> None:
    """Join the cluster that `config` or the environment names, or start Ray on loopback with at least two CPUs."""
    config.check_joined()
    os.environ.update(QUIET)
    handler = signal.getsignal(signal.SIGTERM)
    if address := config.joined:
        _join(address)
    else:
        _start_own(dashboard=config.dashboard)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        # Ray's own handler would end the process silently.
        signal.signal(signal.SIGTERM, handler)


def _start_own(*, dashboard: bool) -> None:
    # Otherwise Ray would resolve 127.0.0.1 to the machine's outward address, and listen on every interface.
    ray_constants.ENABLE_RAY_CLUSTER = False
    for starts in range(1, 4):
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
            # Ray has no error class for this, and no setting for how long it waits.
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if starts == 3:
                raise CutOffError("Ray did not start within 30 s, three times: this machine is too busy") from error


def _join(address: str) -> None:
    # A submitted job already has its environment; Ray rejects a second one.
    submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    try:
        found = str(services.canonicalize_bootstrap_address_or_die(address))
        host, _, port = found.rpartition(":")
        # Where nothing listens Ray itself would retry for minutes, and then end this process.
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        if address == "auto":
            # For a cluster elsewhere the user sets RAY_AUTH_MODE: one without tokens rejects a driver with a token.
            use_token()
        ray.init(
            address=found,
            runtime_env=None if submitted else {"env_vars": WORKER_ENV},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise UserError(
            f"cannot join the Ray cluster at '{address}': {' '.join(str(error).split())[:MAX_REASON]}; see that it "
            f"runs (`ray status --address {address}`) with these versions of Ray and Python (`agentflow submit` needs "
            "none here) and, where it asks for a token, that RAY_AUTH_MODE=token is set; cluster.address=local does "
            "without"
        ) from error


def use_token() -> None:
    """Send the user's Ray token to clusters from now on, if there is one."""
    logging.getLogger(maybe_enable_token_auth_if_token_available.__module__).setLevel(logging.ERROR)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
