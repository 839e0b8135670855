"""The Ray cluster a run uses: one that is there, or one of its own."""

import logging
import os

import ray
from ray._private import ray_constants

from configs.cluster import ClusterConfig

QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would run actors at the lowest priority, behind whatever else the machine does.
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}


def start_ray(config: ClusterConfig) -> None:
    """Connect to `config.address`, or start Ray on loopback with at least the two CPUs that actors claim."""
    os.environ.update(QUIET)
    if config.address:
        ray.init(address=config.address, log_to_driver=False)
        return
    # Ray would resolve 127.0.0.1 to the machine's outward address and listen on every interface, as a cluster
    # of several machines needs; with this it stays on loopback.
    ray_constants.ENABLE_RAY_CLUSTER = False
    ray.init(
        num_cpus=max(2, os.cpu_count() or 1),
        include_dashboard=config.dashboard,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )


def stop_ray() -> None:
    """Leave the cluster; one that this run started ends with it."""
    ray.shutdown()
