"""A job server that does what a test says, and submissions as a user makes them."""

from pathlib import Path
from types import SimpleNamespace

from ray.job_submission import JobDetails, JobStatus, JobType
from ray_jobs.jobs.request import SubmitRequest

from configs.loading import load_run_config
from ray_jobs.submit import plan_submission

SECRET = "sk-live-0123456789"


def make_options(recipe="recipes/mine.toml", **fields):
    return SubmitRequest(recipe=Path(recipe), **{"runtime_env": {}, **fields})


def plan(*overrides, here=True, recipe="recipes/mine.toml", **fields):
    options = make_options(recipe, overrides=overrides, **fields)
    config = load_run_config(options.recipe if options.recipe.is_file() else None, overrides)
    return plan_submission(config, options, here=here)


def make_job(**fields):
    return JobDetails(
        **{
            "type": JobType.SUBMISSION,
            "submission_id": "mine-train-1",
            "status": JobStatus.FAILED,
            "entrypoint": "python -m ray_jobs.cli train recipes/mine.toml",
            "start_time": 1_000,
            "end_time": 62_000,
            "driver_exit_code": 2,
            **fields,
        }
    )


class ScriptedClient:
    """A job server that knows these jobs and this log."""

    def __init__(self, *jobs, log=""):
        self.known = list(jobs)
        self.log = log
        self.submitted = []

    def list_jobs(self):
        return self.known

    def get_job_logs(self, name):
        return self.log

    def stop_job(self, name):
        self.known = [job.model_copy(update={"status": JobStatus.STOPPED}) for job in self.known]

    def submit_job(self, **fields):
        self.submitted.append(fields)

    def _do_request(self, method, endpoint):
        return SimpleNamespace(json=lambda: {"session_name": "session_of_nobody"})
