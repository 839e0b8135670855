"""Submit a recipe to a Ray cluster as a job. `ray job list|logs|stop` shows and ends jobs."""

import asyncio
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from ray._common.utils import get_default_ray_temp_dir
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from actors.cluster import WORKER_ENV, use_token
from configs.api_keys import (
    FILE_SUFFIX,
    certain_key,
    key_file,
    names_a_secret,
    secret_files,
    without_secrets,
    written_secret,
)
from configs.errors import UserError, printable
from configs.loading import load_run_config
from configs.rollout import FolderMemoryConfig
from configs.run import RunConfig
from ray_jobs.run.origin import provenance
from ray_jobs.run.preflight import check_labelling, check_nothing_secret_is_written, check_recipe, key_variables
from ray_jobs.travel import LEFT_BEHIND, check_file_travels, check_named_files, check_no_key_travels, travelling

COMMAND = ("python", "-m", "ray_jobs.cli")
"""The program that runs on the cluster: the code of the working directory, otherwise the installed package."""
POLL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """The arguments of `agentflow submit`."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    phase: str = "train"
    address: str | None = None
    working_dir: Path = Path()
    phase_options: tuple[str, ...] = ()
    runtime_env: Path | None = None
    """A YAML or JSON file with entries to add to Ray's runtime environment."""


def run_submit(request: SubmitRequest, *, follow: bool) -> int:
    """Check, upload and submit a job; with `follow` print its log until it ends. Return the exit code."""
    config = load_run_config(request.recipe, request.overrides)
    check_recipe(config)
    if request.phase == "train-prm" or (request.phase == "train" and config.trains_prm):
        check_labelling(config)
    runtime_env = plan_runtime_env(config, request)
    check_paths(config, request)
    check_package(config, request, runtime_env)
    if request.address:
        # Without this, RAY_ADDRESS would go before the address that was given.
        os.environ["RAY_API_SERVER_ADDRESS"] = request.address
    use_token()
    for module in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging"):
        logging.getLogger(f"ray.{module}").setLevel(logging.ERROR)
    try:
        client = JobSubmissionClient(request.address)
        session = client._do_request("GET", "/api/version").json().get("session_name") or "unknown"
        here = Path(get_default_ray_temp_dir(), session).is_dir()
        job = plan_job(config, request, runtime_env, here=here)
        name = client.submit_job(**job)
        print(f"submitted {name}: {job['entrypoint']}\nrun folder on the cluster: {job['metadata']['run']}")
        print(f"see `ray job logs --follow {name}`, `ray job list` and `ray job stop {name}`")
        for key in key_variables(config):
            print(f"note: {key} is not sent: set it, or {key}{FILE_SUFFIX}, on every machine before its `ray start`")
        return follow_job(client, name) if follow else 0
    except UserError:
        raise
    except (OSError, aiohttp.ClientError, AuthenticationError, RuntimeError, ValueError, TypeError) as error:
        # An address may hold a password. Ray's servers answer with tracebacks, whose last line is the message.
        text = printable(without_secrets(re.sub(r"://[^/\s?#]*@", "://", str(error))))
        lines = text.strip(". \n").splitlines() or [""]
        raise UserError(
            f"the job server failed ({lines[-1 if 'Traceback' in lines[0] else 0][:300]}); give --address "
            "http://HOST:8265 of a running dashboard, or start a cluster here: `ray start --head`. A cluster with a "
            "token (`ray get-auth-token` on its head node) takes it from ~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from error


def plan_job(
    config: RunConfig, request: SubmitRequest, runtime_env: Mapping[str, Any], *, here: bool
) -> dict[str, Any]:
    """Return the arguments of Ray's `submit_job`; `here` is whether the cluster's head runs on this machine."""
    folder, output, phase = request.working_dir.resolve(), Path(config.output_dir), request.phase
    if not output.is_absolute() and not here:
        raise UserError(f"output_dir = '{output}' is relative, and is deleted with the job; give an absolute path")
    run = str(folder / output / config.name)
    overrides = [override for override in request.overrides if not override.startswith("output_dir=")]
    if phase == "resume":
        words = [phase, run, *(override for override in overrides if not override.startswith("name="))]
    else:
        recipe = request.recipe.resolve().relative_to(folder) if request.recipe.exists() else request.recipe
        words = [phase, str(recipe), *overrides, f"output_dir={folder / output}"]
    env = dict(runtime_env["env_vars"])
    if here and sys.prefix != sys.base_prefix:
        # Ray runs a job with the first `python` of PATH; on this machine that should be the current one.
        env.setdefault("PATH", f"{sys.prefix}/bin:${{PATH}}")
    in_driver = phase in ("train-prm", "evaluate")  # `train` asks for its actors' places
    engine = config.rollout.engine
    devices = [engine.device] if config.backend.type == "vllm" else []
    devices += [config.prm.device] if phase == "train-prm" else []
    return {
        "submission_id": f"{config.name}-{phase}-{time.strftime('%Y%m%d-%H%M%S')}",
        "entrypoint": shlex.join([*COMMAND, *words, *request.phase_options]),
        "runtime_env": {**runtime_env, "env_vars": env},
        "metadata": {"run": run},
        "entrypoint_num_cpus": float(in_driver),
        "entrypoint_num_gpus": float(engine.tensor_parallel * (in_driver and "cuda" in devices)),
    }


def plan_runtime_env(config: RunConfig, request: SubmitRequest) -> dict[str, Any]:
    """Return Ray's runtime environment, without keys: Ray writes it to logs that all users of its machines can read."""
    check_nothing_secret_is_written(config, (*request.overrides, *request.phase_options))
    try:
        text = request.runtime_env.read_text(encoding="utf-8-sig") if request.runtime_env else "{}"
        added = yaml.safe_load(text)
        installed = [added.get(name) for name in ("pip", "uv", "conda")]
        files = [part.get("packages") if isinstance(part, dict) else part for part in installed]
        text += "".join(Path(file).read_text() for file in files if isinstance(file, str) and Path(file).is_file())
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"--runtime-env {request.runtime_env} is not a table ({type(error).__name__})") from None
    variables, excludes = added.pop("env_vars", {}), added.pop("excludes", [])
    texts = isinstance(variables, dict) and all(isinstance(value, str) for value in variables.values())
    if not texts or not isinstance(excludes, list) or "working_dir" in added:
        raise UserError(
            "--runtime-env: env_vars is a table of texts, excludes a list of patterns, and working_dir is --working-dir"
        )
    names = key_variables(config)
    secret = next(filter(names_a_secret, variables), None) or written_secret(text, names) or certain_key(text)
    if secret:
        raise UserError(
            f"--runtime-env holds a key ({secret}), and Ray writes a job's environment to its logs; set it in the "
            "environment of the cluster's machines before their `ray start`"
        )
    key_files = {name: path.absolute() for name in names if (path := key_file(name))}
    folder, hidden = request.working_dir.resolve(), set()
    for file in (path.absolute() for path in (*key_files.values(), *secret_files().values())):
        # A link may lead into the folder or out of it, so the file is excluded under each of its names.
        for place in (file, file.parent.resolve() / file.name, file.resolve()):
            if place != folder and place.is_relative_to(folder):
                hidden.add("/" + re.sub(r"([\\\[\]!*#?])", r"\\\1", str(place.relative_to(folder))))
    env = {**WORKER_ENV, **{f"{name}{FILE_SUFFIX}": str(path) for name, path in key_files.items()}, **variables}
    if Path(__file__).resolve().parents[1] == folder:
        excludes = ["/tests/", *excludes]  # they hold made-up keys, which look like others
        if commit := provenance(seed=config.seed)["git_commit"]:
            env["AGENTFLOW_COMMIT"] = commit  # the uploaded copy has no repository that names it
    # The last pattern wins, so a pattern of the user cannot include a file of secrets again.
    return {
        **added,
        "working_dir": str(folder),
        "excludes": [*excludes, *LEFT_BEHIND, *sorted(hidden)],
        "env_vars": env,
    }


def check_package(config: RunConfig, request: SubmitRequest, runtime_env: Mapping[str, Any]) -> None:
    """Check that the package holds all that the recipe names, and that no file in it, or in py_modules, has a key."""
    folder, excludes = Path(runtime_env["working_dir"]), runtime_env["excludes"]
    files = travelling(folder, excludes)
    if request.phase != "resume":
        if request.recipe.exists():
            check_file_travels("recipe", request.recipe.resolve(), folder, files)
        check_named_files(config, request.phase_options, folder, files)
    modules = [name for name in runtime_env.get("py_modules") or () if isinstance(name, str) and "://" not in name]
    check_no_key_travels(files.union(*(travelling(Path(name).absolute(), excludes) for name in modules)))


def check_paths(config: RunConfig, request: SubmitRequest) -> None:
    """Check that the recipe is uploaded, and that the outputs outlive the job's working directory."""
    folder, memory = request.working_dir.resolve(), config.planner.memory
    if request.phase == "resume":
        return
    if request.recipe.exists() and not request.recipe.resolve().is_relative_to(folder):
        raise UserError(f"recipe '{request.recipe}' is outside of --working-dir '{folder}', and is not uploaded")
    options = [part for word in request.phase_options for part in word.split("=", 1)]
    outputs = [("--out", path) for option, path in pairwise(options) if option == "--out"]
    if isinstance(memory, FolderMemoryConfig):
        outputs.append(("agent.memory.path", memory.path))
    for key, path in outputs:
        if not Path(path).is_absolute():
            raise UserError(f"{key} = '{path}' is relative, and would be deleted with the job; give an absolute path")


def follow_job(client: JobSubmissionClient, name: str) -> int:
    """Print a job's log until it ends. Return 0 if it succeeded, 1 if not, 130 after Ctrl-C (the job continues)."""

    async def print_log() -> None:
        async for chunk in client.tail_job_logs(name):
            print(printable(chunk), end="", flush=True)

    try:
        asyncio.run(print_log())
        while not (job := client.get_job_info(name)).status.is_terminal():
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        print(f"\n{name} continues; end it with `ray job stop {name}`")
        return 130
    print(f"{name}: {job.status.value.lower()} {printable(job.message or '')}")
    return int(job.status != JobStatus.SUCCEEDED)
