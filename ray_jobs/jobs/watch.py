"""What a person sees of submitted jobs: their states, their logs, why one failed; and how to stop one."""

import asyncio
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from ray.job_submission import JobDetails, JobStatus
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from configs.errors import printable, visible
from ray_jobs.jobs.client import UNREACHED, JobError, JobServer, connect, server_errors
from ray_jobs.jobs.request import ACTING_PHASES
from ray_jobs.run.console import duration

STYLES = {
    JobStatus.PENDING: "yellow",
    JobStatus.RUNNING: "cyan",
    JobStatus.SUCCEEDED: "green",
    JobStatus.STOPPED: "magenta",
    JobStatus.FAILED: "red",
}
TAIL_LINES = 12
STOP_PATIENCE_S = 60.0
LOOK_EVERY_S = 2.0
PATIENCE_S = 60.0
"""Of a reader with a server that cannot be reached."""
_OURS = "agentflow: error: "
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")


def run_status(address: str | None, name: str | None) -> int:
    """All jobs, or one with the end of its log. Returns 1 for a job that failed. Raises JobError."""
    server, console = connect(address), Console()
    if name is None:
        console.print(jobs_table(server.jobs(), server.url))
        return 0
    job = server.job(name)
    console.print(job_table(job))
    lines = _tail_of(server, job, console)
    for line in lines:
        console.print(Text(f"  {line}", style="dim"), soft_wrap=True)
    if job.status == JobStatus.FAILED:
        tell_failure(console, job, lines)
    return int(job.status == JobStatus.FAILED)


def run_logs(address: str | None, name: str, *, keep_on: bool) -> int:
    """The log as it stands, or until the job has ended. Raises JobError."""
    server = connect(address)
    job = server.job(name)
    if keep_on:
        return follow(server, str(job.submission_id))
    sys.stdout.write(printable(_log(server, job)))
    return 0


def run_stop(address: str | None, name: str) -> int:
    """End a job and wait until it has ended. Raises JobError."""
    server, console = connect(address), Console()
    job = server.job(name)
    if job.status.is_terminal():
        console.print(f"{_name(job)} has ended already: {_state(job)}", markup=False)
        return 0
    with server_errors(server.url):
        server.client.stop_job(str(job.submission_id))
    deadline = time.monotonic() + STOP_PATIENCE_S
    with console.status(Text(f"stopping {_name(job)}")):
        while not (job := server.job(name)).status.is_terminal():
            if time.monotonic() > deadline:
                raise JobError(_not_ended(job))
            time.sleep(0.5)
    console.print(f"{_name(job)}: {_state(job)}", markup=False)
    if said := _goes_on(job.metadata or {}):
        console.print(said, markup=False, soft_wrap=True)
    return 0


def _not_ended(job: JobDetails) -> str:
    name = _name(job)
    if job.status == JobStatus.PENDING:
        return (
            f"{name} has not begun ({_one_line(job.message)}), and Ray stops no job before it has: it ends when it "
            "would begin, or where it cannot within 15 min"
        )
    return f"{name} has not ended within {STOP_PATIENCE_S:.0f} s; `agentflow jobs {name}` tells"


def _goes_on(metadata: Mapping[str, str]) -> str | None:
    """What to do about a job that was stopped; None where nobody knows."""
    if metadata.get("phase") in ACTING_PHASES:
        return "what it wrote is kept: the same `agentflow submit` again goes on from there"
    if not (run := metadata.get("run")):
        return None
    recipe, path = metadata.get("recipe", "RECIPE"), Path(run)
    # The recipe alone may name another run, or another folder; a run's own folder takes no settings.
    settings = [] if Path(recipe).is_dir() else [f"name={path.name}", f"output_dir={path.parent}"]
    words = shlex.join([recipe, *settings, "--phase", "resume"])
    return visible(f"what it wrote is kept: `agentflow submit {words}` goes on with {run}")


def follow(server: JobServer, name: str) -> int:
    """Print a job's log until it has ended, then how. Returns 0 where it succeeded, 1 where it did not, 130 where the
    reader left before (the job goes on)."""
    console = Console()
    try:
        job = _followed(server, name, console)
    except KeyboardInterrupt:
        console.print(f"\n{visible(name)} goes on; stop it with `agentflow jobs stop {visible(name)}`", markup=False)
        return 130
    console.print(f"{visible(name)}: {_state(job)}", markup=False)
    if job.status == JobStatus.FAILED:
        tell_failure(console, job, _tail_of(server, job, console))
    return int(job.status != JobStatus.SUCCEEDED)


def _followed(server: JobServer, name: str, console: Console) -> JobDetails:
    """The job, once it has ended. Raises JobError where the server is gone."""
    log, told = _Log(server, name, console), ""
    while not (job := _asked(server, name, console)).status.is_terminal():
        if job.status == JobStatus.PENDING:
            if (said := _one_line(job.message)) != told:
                console.print(Text(f"{visible(name)} is pending: {said}", style="yellow"), soft_wrap=True)
                told = said
        elif asyncio.run(log.print_more()):
            continue
        time.sleep(LOOK_EVERY_S)
    asyncio.run(log.print_more())
    return job


def _asked(server: JobServer, name: str, console: Console) -> JobDetails:
    """The job; a server that cannot be reached is asked again. Raises JobError where it stays away, or refuses."""
    give_up, told = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            return server.job(name)
        except JobError as error:
            if not isinstance(error.__cause__, UNREACHED) or time.monotonic() > give_up:
                raise
            if not told:
                told = True
                console.print(f"{visible(str(error))}; the job goes on, and is asked for again", markup=False)
        time.sleep(LOOK_EVERY_S)


class _Log:
    """A job's log as it is printed: from one stream or, where that breaks off, from several."""

    def __init__(self, server: JobServer, name: str, console: Console) -> None:
        self._server = server
        self._name = name
        self._console = console
        self._printed = 0
        self._told = False

    async def print_more(self) -> bool:
        """Until the stream ends, which begins where the log does. Returns whether anything was new."""
        before, skip = self._printed, self._printed
        async for chunk in self._chunks():
            new = chunk[skip:]
            skip -= len(chunk) - len(new)
            self._printed += len(new)
            sys.stdout.write(printable(new))
            sys.stdout.flush()
        return self._printed > before

    async def _chunks(self) -> AsyncIterator[str]:
        try:
            async for chunk in self._server.client.tail_job_logs(self._name):
                yield chunk
        except (RuntimeError, *UNREACHED) as error:
            # The job goes on without its readers, and the next stream where this one broke off.
            if not self._told:
                self._told = True
                said = f"the stream of its log broke off: {_one_line(str(error))}"
                self._console.print(Text(said, style="yellow"), soft_wrap=True)


def jobs_table(jobs: Sequence[JobDetails], url: str) -> Table:
    table = Table(title=escape(f"Jobs on {visible(url)}"), title_justify="left")
    for column in ("job", "state", "recipe", "took"):
        table.add_column(column, no_wrap=column != "recipe", overflow="fold")
    for job in jobs:
        recipe = Text(visible((job.metadata or {}).get("recipe", "")))
        table.add_row(Text(_name(job)), _state(job), recipe, _took(job))
    return table


def job_table(job: JobDetails) -> Table:
    """A job's facts. Of its environment nothing is shown: it may hold keys."""
    table = Table(title=escape(f"Job {_name(job)}"), title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    told = {key: value for key, value in (job.metadata or {}).items() if not key.startswith("job_")}
    rows: list[tuple[str | Text, str | Text]] = [
        ("state", _state(job)),
        *([("waits for", Text(_one_line(job.message)))] if job.status == JobStatus.PENDING else []),
        ("runs", Text(visible(job.entrypoint))),
        *((Text(visible(key)), Text(visible(value))) for key, value in told.items()),
        ("started", _clock(job.start_time)),
        ("took", _took(job)),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def tell_failure(console: Console, job: JobDetails, lines: Sequence[str]) -> None:
    """How a job failed and what to do about it."""
    console.print(Text("why", style="bold red"), Text(why_failed(job, lines)), soft_wrap=True)


def why_failed(job: JobDetails, lines: Sequence[str]) -> str:
    """The reason in the words of the log's last lines where these say it, with what to do."""
    log = "\n".join([printable(job.message or ""), *lines])
    if ours := [line for line in log.splitlines() if line.startswith(_OURS)]:
        return ours[-1].removeprefix(_OURS)
    if modules := _MISSING_MODULE.findall(log):
        whose = "is not in the working directory and not installed" if modules[-1] == "ray_jobs" else "is missing"
        return (
            f"the module '{modules[-1]}' {whose} on the cluster; submit from the project's folder (--working-dir), and "
            "install the project's dependencies on every node (deploy/Dockerfile) or with --runtime-env"
        )
    if job.driver_exit_code in (-9, 137) or "out of memory" in log.lower():
        return "a process was killed, as the system does when memory runs out; give the node more, or the run less"
    if job.driver_exit_code is None and job.driver_node_id is None:
        return f"it did not get as far as its command: {_one_line(job.message)}"
    if job.driver_exit_code is None:
        return (
            f"its command was lost, with its machine or with Ray's process that started it: {_one_line(job.message)}"
            f"{f'; {said}' if (said := _goes_on(job.metadata or {})) else ''}"
        )
    last = next((line for line in reversed(lines) if line.strip()), "its log is empty")
    return f"exit code {job.driver_exit_code}, last line: {last}"


def tail(log: str) -> list[str]:
    """The last lines, harmless to print."""
    return printable(log).rstrip().splitlines()[-TAIL_LINES:]


def _tail_of(server: JobServer, job: JobDetails, console: Console) -> list[str]:
    """The end of its log. It goes with the machine that it was written on: then that is said."""
    try:
        return tail(_log(server, job))
    except JobError as error:
        console.print(Text(f"its log cannot be read: {_one_line(str(error))}", style="yellow"), soft_wrap=True)
        return []


def _log(server: JobServer, job: JobDetails) -> str:
    with server_errors(server.url):
        return str(server.client.get_job_logs(str(job.submission_id)) or "")


def _one_line(message: str | None) -> str:
    return " ".join(printable(message or "no reason given").split())


def _name(job: JobDetails) -> str:
    """Whoever submitted it chose it."""
    return visible(str(job.submission_id))


def _state(job: JobDetails) -> Text:
    return Text(job.status.value.lower(), style=STYLES[job.status])


def _clock(millis: int | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(millis / 1000)) if millis else ""


def _took(job: JobDetails) -> str:
    return duration((job.end_time or time.time() * 1000) / 1000 - job.start_time / 1000) if job.start_time else ""
