"""The commands for a Ray cluster: send a job there, see what becomes of it, end it."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ray_jobs.commands.given import Address, Given, Job, RuntimeEnv, Words, sorted_out
from ray_jobs.jobs.request import Phase, SubmitRequest


def submit(
    *given: Given,
    phase: Annotated[Phase, Parameter(help="what to run there")] = "train",
    working_dir: Annotated[Path, Parameter(metavar="FOLDER", help="what travels, without caches and runs")] = Path(),
    follow: Annotated[bool, Parameter(help="print the job's log until it has ended")] = False,
    options: Words = (),
    runtime_env: RuntimeEnv = None,
    address: Address = None,
) -> int:
    """Run `train` or one of its phases as a job on a Ray cluster."""
    path, changes = sorted_out(given)
    from ray_jobs.jobs.submit import run_submit

    return run_submit(
        SubmitRequest(
            recipe=path,
            overrides=changes,
            phase=phase,
            address=address,
            working_dir=working_dir,
            follow=follow,
            phase_options=options,
            runtime_env=runtime_env or {},
        )
    )


def jobs(job: Job | None = None, /, *, address: Address = None) -> int:
    """The jobs of a Ray cluster, or one of them with the end of its log."""
    from ray_jobs.jobs.watch import run_status

    return run_status(address, job)


def logs(
    job: Job,
    /,
    *,
    follow: Annotated[bool, Parameter(help="go on until the job has ended")] = False,
    address: Address = None,
) -> int:
    """The log of a job."""
    from ray_jobs.jobs.watch import run_logs

    return run_logs(address, job, keep_on=follow)


def stop(job: Job, /, *, address: Address = None) -> int:
    """End a job; its run can be resumed."""
    from ray_jobs.jobs.watch import run_stop

    return run_stop(address, job)
