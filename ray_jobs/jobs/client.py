"""The job server of a Ray cluster: found, reached, asked; what goes wrong there in one line."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from ray._private.utils import split_address
from ray.dashboard.utils import ray_address_to_api_server_url
from ray.exceptions import AuthenticationError, RuntimeEnvSetupError
from ray.job_submission import JobDetails, JobSubmissionClient

from actors.cluster import check_listens, find_cluster, use_token
from configs.errors import UserError

ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
DEFAULT_PORTS = {"http": 80, "https": 443}
START = "start one with `ray start --head --dashboard-host=127.0.0.1`"


class JobError(UserError):
    """A job could not be submitted, found, read or stopped; the message says what to do."""


class JobServer:
    """Where jobs go. `url` is that of the cluster's dashboard."""

    def __init__(self, url: str, client: JobSubmissionClient) -> None:
        self.url = url
        self.client = client

    @property
    def is_here(self) -> bool:
        """Whether the address is one of this machine (or a tunnel that begins here)."""
        return (urlsplit(self.url).hostname or "") in ("localhost", "127.0.0.1", "::1")

    def job(self, name: str) -> JobDetails:
        """One job by its submission id. Raises JobError, which says which jobs there are."""
        jobs = self.jobs()
        for job in jobs:
            if name in (job.submission_id, job.job_id):
                return job
        known = ", ".join(str(job.submission_id) for job in jobs[:8]) or "none"
        raise JobError(f"{self.url} knows no job '{name}'; the newest it knows: {known}")

    def jobs(self) -> list[JobDetails]:
        """The submitted jobs, newest first."""
        with server_errors(self.url):
            jobs = self.client.list_jobs()
        submitted = [job for job in jobs if job.submission_id]
        return sorted(submitted, key=lambda job: job.start_time or 0, reverse=True)


def connect(address: str | None) -> JobServer:
    """The job server at `address` (`http://host:8265`, or a cluster's host:port), else where RAY_API_SERVER_ADDRESS or
    RAY_ADDRESS say, else of the cluster that runs on this machine. Raises JobError."""
    named = address or next((value for name in ADDRESS_VARIABLES if (value := os.environ.get(name))), "auto")
    use_token()
    url = _dashboard_url(named)
    # Ray would put these in the place of what was asked for.
    for name in ADDRESS_VARIABLES:
        os.environ.pop(name, None)
    for module in ("modules.dashboard_sdk", "modules.job.sdk"):
        logging.getLogger(f"ray.dashboard.{module}").setLevel(logging.WARNING)
    for module in ("packaging", "working_dir"):
        logging.getLogger(f"ray._private.runtime_env.{module}").setLevel(logging.ERROR)
    with server_errors(url):
        return JobServer(url, JobSubmissionClient(url))


@contextmanager
def server_errors(url: str) -> Iterator[None]:
    """What may go wrong between here and a job server, as a JobError."""
    try:
        yield
    except AuthenticationError as error:
        raise JobError(
            f"{url} asks for a token, and not for the one here; put the cluster's (`ray get-auth-token` on its head "
            "node) into ~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from error
    except OSError as error:
        raise JobError(f"{url} does not answer ({_first_line(error)}); is the head node up?") from error
    except (RuntimeError, ValueError, RuntimeEnvSetupError) as error:
        raise JobError(f"{url} refused: {_first_line(error)}") from error


def _dashboard_url(named: str) -> str:
    if named.startswith(("http://", "https://")):
        parts = urlsplit(named)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        with _no_cluster(named):
            check_listens(f"{host}:{parts.port or DEFAULT_PORTS[parts.scheme]}")
        return named.rstrip("/")
    if "://" in named:
        raise JobError(
            f"'{split_address(named)[0]}://' is no address of a job server; give http://host:8265, where the dashboard "
            "listens, or host:port of the cluster"
        )
    with _no_cluster(named):
        cluster = find_cluster(named)
    try:
        return ray_address_to_api_server_url(cluster)
    except ValueError as error:
        raise JobError(
            f"the cluster at {cluster} runs without a dashboard, which takes jobs; start its head node with "
            "`ray start --head --include-dashboard=true` (and `ray[default]` installed)"
        ) from error


@contextmanager
def _no_cluster(named: str) -> Iterator[None]:
    where = "on this machine" if named == "auto" else f"at {named}"
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise JobError(
            f"no Ray cluster {where}: {_first_line(error)}; {START}, or name another with --address"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
