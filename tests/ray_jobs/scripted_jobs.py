"""A job server with scripted answers, and jobs as a user submits them."""

from pathlib import Path
from types import SimpleNamespace

from ray.job_submission import JobStatus

from configs.loading import load_run_config
from ray_jobs.submit import SubmitRequest, plan_job, plan_runtime_env

SECRET = "sk-live-0123456789"


def job_for(*overrides, here=True, recipe="recipes/mine.toml", **fields):
    request = SubmitRequest(recipe=Path(recipe), overrides=overrides, **fields)
    config = load_run_config(request.recipe, overrides)
    return plan_job(config, request, plan_runtime_env(config, request), here=here)


class ScriptedClient:
    """Answers with each of `states` in turn, then with the last one; its log is `chunks`."""

    def __init__(self, states=(JobStatus.SUCCEEDED,), chunks=()):
        self.states = list(states)
        self.chunks = chunks
        self.submitted = []

    def submit_job(self, **fields):
        self.submitted.append(fields)
        return fields["submission_id"]

    def get_job_info(self, name):
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return SimpleNamespace(status=state, message="")

    async def tail_job_logs(self, name):
        for chunk in self.chunks:
            yield chunk

    def _do_request(self, method, endpoint):
        return SimpleNamespace(json=lambda: {"session_name": "session_elsewhere"})
