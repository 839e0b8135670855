"""Submit a recipe to a Ray cluster as a job. `ray job list|logs|stop` shows and ends jobs."""

import asyncio
import logging
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from ray._common.utils import get_default_ray_temp_dir
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from actors.cluster import WORKER_ENV, use_token
from configs.api_keys import FILE_SUFFIX, certain_key, key_file, names_a_secret, secret_files, written_secret
from configs.errors import UserError, printable
from configs.loading import load_run_config
from configs.rollout import FolderMemoryConfig
from configs.run import RunConfig
from ray_jobs.run.origin import provenance, saved_config
from ray_jobs.run.preflight import check_labelling, check_nothing_secret_is_written, check_recipe, key_variables

COMMAND = ("python", "-m", "ray_jobs.cli")
"""The program that runs on the cluster: the code of the working directory, otherwise the installed package."""
LEFT_BEHIND = (
    *(".git/", ".venv/", "venv/", "runs/", ".cache/", "__pycache__/", "*.egg-info/", "node_modules/"),
    *(".pytest_cache/", ".mypy_cache/", ".ruff_cache/", ".hypothesis/", "*.safetensors", "*.gguf", "*.ckpt"),
    *(".env", ".env.*", "*.env", ".netrc", "*.pem", "*.key"),
)
"""Never uploaded, in addition to what .gitignore and .rayignore exclude: Ray keeps a copy of the working directory."""
PATIENCE_S, POLL_S = 60.0, 2.0
UNREACHABLE = (OSError, aiohttp.ClientError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """The arguments of `agentflow submit`."""

    recipe: Path
    """A recipe; for phase `resume` also a run folder."""
    overrides: tuple[str, ...] = ()
    phase: str = "train"
    address: str | None = None
    working_dir: Path = Path()
    phase_options: tuple[str, ...] = ()
    runtime_env: Path | None = None
    """A YAML or JSON file with entries to add to Ray's runtime environment."""


def run_submit(request: SubmitRequest, *, follow: bool) -> int:
    """Check, upload and submit a job; with `follow` print its log until it ends. Return the exit code."""
    from_folder = request.phase == "resume" and request.recipe.is_dir()
    if request.phase == "resume" and (request.phase_options or (from_folder and request.overrides)):
        raise UserError("a resumed run keeps its own settings; leave out --options and the settings")
    config = saved_config(request.recipe) if from_folder else load_run_config(request.recipe, request.overrides)
    check_recipe(config)
    if request.phase == "label" or (request.phase == "train" and config.trains_prm):
        check_labelling(config)
    runtime_env = plan_runtime_env(config, request)
    check_paths(config, request)
    use_token()
    for module in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging"):
        logging.getLogger(f"ray.{module}").setLevel(logging.ERROR)
    if re.match(r"(?!https?://)\w+://", request.address or ""):
        raise UserError("--address: give http://HOST:8265 of the dashboard, or HOST:PORT of the cluster")
    with _one_line_errors():
        client = JobSubmissionClient(request.address)
        session = client._do_request("GET", "/api/version").json().get("session_name") or "unknown"
        here = Path(get_default_ray_temp_dir(), session).is_dir()
        job = plan_job(config, request, runtime_env, here=here)
        _send(client, job)
        name = job["submission_id"]
        print(f"submitted {name}: {job['entrypoint']}\nrun folder on the cluster: {job['metadata']['run']}")
        print(f"see `ray job logs --follow {name}`, `ray job list` and `ray job stop {name}`")
        for key in key_variables(config):
            print(f"note: {key} is not sent: set it, or {key}{FILE_SUFFIX}, on every machine before its `ray start`")
        return follow_job(client, name) if follow else 0


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except AuthenticationError as error:
        raise UserError(
            "the cluster rejects the token of this machine; put the cluster's (`ray get-auth-token` on its head node) "
            "into ~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from error
    except (*UNREACHABLE, RuntimeError, ValueError, TypeError) as error:
        # An address may hold a password. Ray's servers answer with tracebacks, whose last line is the message.
        lines = printable(re.sub(r"://[^/\s?#]*@", "://", str(error))).strip(". \n").splitlines() or [""]
        raise UserError(
            f"the job server failed ({lines[-1 if 'Traceback' in lines[0] else 0][:300]}); give --address "
            "http://HOST:8265 of a running dashboard, or start a cluster here: `ray start --head`"
        ) from error


def plan_job(
    config: RunConfig, request: SubmitRequest, runtime_env: Mapping[str, Any], *, here: bool
) -> dict[str, Any]:
    """Return the arguments of Ray's `submit_job`; `here` is whether the cluster's head runs on this machine."""
    folder, output, phase = request.working_dir.resolve(), Path(config.output_dir), request.phase
    if phase == "resume" and request.recipe.is_dir():
        output = request.recipe.resolve().parent
    elif not output.is_absolute() and not here:
        raise UserError(
            f"output_dir = '{output}' is relative, and Ray deletes a job's working directory on the cluster; give an "
            "absolute path, e.g. output_dir=/mnt/shared/runs"
        )
    output = folder / output
    run, words = str(output / config.name), ["resume", str(output / config.name)]
    if phase != "resume":
        recipe = request.recipe.resolve().relative_to(folder) if request.recipe.exists() else request.recipe
        overrides = [override for override in request.overrides if not override.startswith("output_dir=")]
        words = [phase, str(recipe), *overrides, f"output_dir={output}", *request.phase_options]
    env = dict(runtime_env["env_vars"])
    if here and sys.prefix != sys.base_prefix:
        # Ray runs a job with the first `python` of PATH; on this machine that should be the current one.
        env.setdefault("PATH", f"{sys.prefix}/bin:${{PATH}}")
    # These phases sample in the driver, which Ray must therefore place; `train` asks for its actors' places.
    runs_in_driver = phase in ("collect", "label", "train-prm", "evaluate")
    engine, uses_card = config.rollout.engine, config.prm.device == "cuda"
    cards = 1
    if phase != "train-prm":
        samples = {"label": config.label.type == "monte_carlo", "evaluate": config.backend.type == "vllm"}
        cards, uses_card = engine.tensor_parallel, engine.device == "cuda" and samples.get(phase, True)
    return {
        "submission_id": f"{config.name}-{phase}-{time.strftime('%Y%m%d-%H%M%S')}",
        "entrypoint": shlex.join([*COMMAND, *words]),
        "runtime_env": {**runtime_env, "env_vars": env},
        "metadata": {"phase": phase, "recipe": str(request.recipe), "name": config.name, "run": run},
        "entrypoint_num_cpus": float(runs_in_driver),
        "entrypoint_num_gpus": float(cards * (runs_in_driver and uses_card)),
    }


def plan_runtime_env(config: RunConfig, request: SubmitRequest) -> dict[str, Any]:
    """Return Ray's runtime environment: the working directory without secrets, and variables without keys.

    Ray writes a job's environment to logs that all users of its machines can read, so a key in it is rejected.
    """
    check_nothing_secret_is_written(config, (*request.overrides, *request.phase_options))
    try:
        text = request.runtime_env.read_text(encoding="utf-8") if request.runtime_env else "{}"
        added = yaml.safe_load(text)
        installed = [added.get(name) for name in ("pip", "uv", "conda")]
        files = [part.get("packages") if isinstance(part, dict) else part for part in installed]
        text += "".join(Path(file).read_text() for file in files if isinstance(file, str) and Path(file).is_file())
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"--runtime-env {request.runtime_env} is not a table ({type(error).__name__})") from None
    variables, excludes = added.pop("env_vars", {}), added.pop("excludes", [])
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise UserError("--runtime-env: env_vars must be a table of NAME: text; put numbers in quotes")
    if not isinstance(excludes, list) or "working_dir" in added:
        raise UserError("--runtime-env: excludes must be a list of patterns; give working_dir as --working-dir")
    names = key_variables(config)
    secret = next(filter(names_a_secret, variables), None) or written_secret(text, names) or certain_key(text)
    if secret:
        raise UserError(
            f"--runtime-env holds a key ({secret}), and Ray writes a job's environment to its logs; set it in the "
            "environment of the cluster's machines before their `ray start`"
        )
    key_files = {name: str(Path(path).expanduser().absolute()) for name in names if (path := key_file(name))}
    folder, hidden = request.working_dir.resolve(), set()
    for file in (Path(path).expanduser().absolute() for path in (*key_files.values(), *secret_files().values())):
        # A link may lead into the folder or out of it, so the file is excluded under each of its names.
        for place in (file, file.parent.resolve() / file.name, file.resolve()):
            if place != folder and place.is_relative_to(folder):
                hidden.add("/" + re.sub(r"([\\\[\]!*#?])", r"\\\1", str(place.relative_to(folder))))
    env = {**WORKER_ENV, **{f"{name}{FILE_SUFFIX}": path for name, path in key_files.items()}, **variables}
    if Path(__file__).resolve().parents[1] == folder:
        # The uploaded copy of this code has no repository that names its commit.
        facts = provenance(seed=config.seed)
        env["AGENTFLOW_COMMIT"] = (
            f"{(facts['git_commit'] or 'unknown')[:12]}{' with changes' * bool(facts['git_dirty'])}"
        )
    # The last pattern wins, so a pattern of the user cannot include a file of secrets again.
    return {
        **added,
        "working_dir": str(folder),
        "excludes": [*excludes, *LEFT_BEHIND, *sorted(hidden)],
        "env_vars": env,
    }


def check_paths(config: RunConfig, request: SubmitRequest) -> None:
    """Check that the recipe is uploaded, and that the outputs outlive the job's working directory."""
    folder, memory = request.working_dir.resolve(), config.planner.memory
    if not folder.is_dir():
        raise UserError(f"--working-dir '{request.working_dir}' is not a folder")
    if request.phase == "resume":
        return
    if request.recipe.exists() and not request.recipe.resolve().is_relative_to(folder):
        raise UserError(f"recipe '{request.recipe}' is outside of --working-dir '{folder}', and is not uploaded")
    options = [part for word in request.phase_options for part in word.split("=", 1)]
    outputs = {
        "agent.memory.path": memory.path if isinstance(memory, FolderMemoryConfig) else None,
        "--out": options[options.index("--out") + 1] if "--out" in options[:-1] else None,
    }
    for key, path in outputs.items():
        if path and not Path(path).is_absolute():
            raise UserError(f"{key} = '{path}' is relative, and would be deleted with the job; give an absolute path")


def _send(client: JobSubmissionClient, job: Mapping[str, Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            client.submit_job(**job)
            return
        except RuntimeError as error:
            # The agents of a cluster's nodes start some seconds after `ray start` returns.
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def follow_job(client: JobSubmissionClient, name: str) -> int:
    """Print a job's log until it ends. Return 0 if it succeeded, 1 if not, 130 after Ctrl-C (the job continues)."""
    printed, reached, message = 0, time.monotonic(), None

    async def print_more() -> None:
        nonlocal printed
        skip = printed
        async for chunk in client.tail_job_logs(name):
            new = chunk[skip:]
            skip -= len(chunk) - len(new)
            printed += len(new)
            print(printable(new), end="", flush=True)

    try:
        while True:
            try:
                job = client.get_job_info(name)
                if job.status == JobStatus.PENDING and job.message != message:
                    message = job.message
                    print(f"{name} is pending: {printable(message or '')}")
                if job.status != JobStatus.PENDING:
                    asyncio.run(print_more())
                if job.status.is_terminal():
                    break
                reached = time.monotonic()
            except (RuntimeError, *UNREACHABLE):
                # The job continues without a reader; the next stream starts again at the log's beginning.
                if time.monotonic() > reached + PATIENCE_S:
                    raise
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        print(f"\n{name} continues; end it with `ray job stop {name}`")
        return 130
    print(f"{name}: {job.status.value.lower()} {printable(job.message or '')}")
    return int(job.status != JobStatus.SUCCEEDED)
