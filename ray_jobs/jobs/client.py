"""The job server of a Ray cluster: found, reached, asked; what goes wrong there in one line."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil
from ray._private.utils import split_address
from ray.dashboard.utils import ray_address_to_api_server_url
from ray.exceptions import AuthenticationError, RuntimeEnvSetupError
from ray.job_submission import JobDetails, JobSubmissionClient
from requests.utils import get_environ_proxies, select_proxy

from actors.cluster import check_listens, find_cluster, speaks_http, use_token
from configs.errors import UserError

ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
DEFAULT_PORTS = {"http": 80, "https": 443}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
START = "start one with `ray start --head --dashboard-host=127.0.0.1`"
TRACEBACK = "Traceback (most recent call last)"

UNREACHED = (OSError, aiohttp.ClientError)
"""What Ray's client of jobs lets out where the way to a job server breaks."""


class JobError(UserError):
    """A job could not be submitted, found, read or stopped; the message says what to do."""


class JobServer:
    """Where jobs go: `url` is the dashboard's, `session` Ray's name of the cluster, where it is known."""

    def __init__(self, url: str, client: JobSubmissionClient, session: str | None = None) -> None:
        self.url = url
        self.client = client
        self._session = session

    @property
    def is_here(self) -> bool:
        """Whether the cluster's head is this machine. The address alone does not say it: a tunnel begins here, too."""
        return _host(self.url) in LOOPBACK if self._session is None else _heads(self._session)

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
    found = _dashboard_url(named)
    url = without_user(found)
    # Ray would put these in the place of what was asked for.
    for name in ADDRESS_VARIABLES:
        os.environ.pop(name, None)
    for module in ("modules.dashboard_sdk", "modules.job.sdk"):
        logging.getLogger(f"ray.dashboard.{module}").setLevel(logging.WARNING)
    for module in ("packaging", "working_dir"):
        logging.getLogger(f"ray._private.runtime_env.{module}").setLevel(logging.ERROR)
    _ask_loopback_directly(url)
    with server_errors(url), _no_job_server(url):
        client = JobSubmissionClient(found)
        return JobServer(url, client, client._do_request("GET", "/api/version").json().get("session_name"))


def without_user(text: str) -> str:
    """The same without the user and the password that an address in it may hold."""
    return re.sub(r"://[^/\s?#]*@", "://", text)


@contextmanager
def server_errors(url: str) -> Iterator[None]:
    """What may go wrong between here and a job server, as a JobError."""
    try:
        yield
    except AuthenticationError as error:
        raise JobError(
            f"{url} asks for a token, and not for the one here; put the cluster's (`ray get-auth-token` on its head "
            f"node) into ~/.ray/auth_token or RAY_AUTH_TOKEN{_proxy_of(url)}"
        ) from error
    except UNREACHED as error:
        raise JobError(f"{url} does not answer ({_said(error)}); is the head node up?{_proxy_of(url)}") from error
    except (RuntimeError, ValueError, TypeError, RuntimeEnvSetupError) as error:
        raise JobError(f"{url} refused: {_said(error)}") from error


@contextmanager
def _no_job_server(url: str) -> Iterator[None]:
    """Something else may answer there."""
    try:
        yield
    except AuthenticationError:
        raise
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:
        raise JobError(
            f"{url} is no job server of Ray ({_said(error)}); give http://host:8265, where the dashboard "
            f"listens{_proxy_of(url)}"
        ) from error


def _dashboard_url(named: str) -> str:
    if named.startswith(("http://", "https://")):
        parts = urlsplit(named)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        with _no_cluster(named):
            address = f"{host}:{parts.port or DEFAULT_PORTS[parts.scheme]}"
            if _host(named) in LOOPBACK or not _proxied(named):
                check_listens(address)
        # What a browser shows of the dashboard ends in `#/jobs`.
        return named.partition("#")[0].rstrip("/")
    if "://" in named:
        raise JobError(
            f"'{split_address(named)[0]}://' is no address of a job server; give http://host:8265, where the dashboard "
            "listens, or host:port of the cluster"
        )
    if named != "auto" and speaks_http(named):
        # The dashboard's, which `ray start` prints without a scheme.
        return f"http://{named}"
    with _no_cluster(named):
        cluster = find_cluster(named)
    try:
        return ray_address_to_api_server_url(cluster)
    except ValueError as error:
        raise JobError(
            f"the cluster at {cluster} runs without a dashboard, which takes jobs; start its head node with "
            "`ray start --head --include-dashboard=true` (and `ray[default]` installed)"
        ) from error


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def _heads(session: str) -> bool:
    """Whether the cluster's store runs on this machine, and this process sees its folder: that of one in a container,
    whose port is published here, lies elsewhere."""
    for process in psutil.process_iter(["cmdline"]):
        program, *words = process.info["cmdline"] or [""]
        for word in words if Path(program).name == "gcs_server" else ():
            before, found, _ = word.partition(session)
            if found and Path(before.rpartition("=")[2] + session).is_dir():
                return True
    return False


def _ask_loopback_directly(url: str) -> None:
    """A proxy of the environment knows nothing of what listens here."""
    if (host := _host(url)) in LOOPBACK and _proxied(url):
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), host)))


def _proxied(url: str) -> bool:
    """Whether Ray's client asks for this through a proxy of the environment."""
    return select_proxy(url, get_environ_proxies(url)) is not None


def _proxy_of(url: str) -> str:
    """What to say where a proxy is asked; empty where none is."""
    if not _proxied(url):
        return ""
    return f" (asked through the proxy of the environment; to go without, add {_host(url)} to NO_PROXY)"


@contextmanager
def _no_cluster(named: str) -> Iterator[None]:
    where = "on this machine" if named == "auto" else f"at {without_user(named)}"
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise JobError(f"no Ray cluster {where}: {_said(error)}; {START}, or name another with --address") from error


def _said(error: BaseException) -> str:
    """The first line of what it says; of a traceback, with which Ray's servers answer, the last."""
    text = without_user(str(error)).strip()
    if TRACEBACK in text.partition("\n")[0]:
        return text.rstrip(". \n").splitlines()[-1][:300]
    return (text.splitlines() or [type(error).__name__])[0][:300]
