"""Send a phase to a Ray cluster as a job: what is checked, packed and handed over."""

import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from actors.cluster import WORKER_ENV
from configs.api_keys import FILE_SUFFIX, how_to_set, key_file, names_a_secret, written_secret
from configs.loading import load_run_config
from configs.run import RunConfig
from ray_jobs.checks.keys import key_variables
from ray_jobs.jobs.client import JobError, JobServer, connect, server_errors
from ray_jobs.jobs.watch import ACTING_PHASES, follow
from ray_jobs.run.begun import begun_config
from ray_jobs.run.preflight import check_labelling, check_recipe
from ray_jobs.run.provenance import provenance

COMMAND = ("python", "-m", "ray_jobs.cli")
"""What runs on the cluster: the code of the working directory, else what is installed there."""

LEFT_BEHIND = (
    *(".git/", ".venv/", "venv/", "runs/", ".cache/", "__pycache__/", "*.egg-info/", "node_modules/"),
    *(".pytest_cache/", ".mypy_cache/", ".ruff_cache/", ".hypothesis/", "*.safetensors", "*.gguf", "*.ckpt"),
    *(".env", ".env.*", "*.env", ".netrc", "*.pem", "*.key"),
)
"""Never part of the working directory, besides what .gitignore and .rayignore say: Ray keeps a copy of it."""


STILL_STARTS = "No available agent to submit job"
"""What a job server answers whose nodes' agents are not up yet, some seconds after `ray start`."""
STARTS_WITHIN_S, ASK_AGAIN_S = 60.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """`recipe` is a recipe, or for `resume` also the folder of a run. `runtime_env` is Ray's, to be added to ours."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    phase: str = "train"
    address: str | None = None
    working_dir: Path = Path()
    follow: bool = False
    phase_options: tuple[str, ...] = ()
    runtime_env: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job as the cluster gets it: without keys, which its machines must have. `key_names` are the variables that the
    recipe names, and `key_files` the paths on every machine where those of them are read from that are in files."""

    submission_id: str
    entrypoint: str
    runtime_env: Mapping[str, Any]
    metadata: Mapping[str, str]
    num_cpus: float
    num_gpus: float
    run: str
    key_names: tuple[str, ...]
    key_files: Mapping[str, str]


def run_submit(request: SubmitRequest) -> int:
    """Check, pack and submit; with `follow`, print the log until the job has ended. Returns the exit code. Raises
    ConfigError, PreflightError and JobError before anything reaches the cluster."""
    config = _config(request)
    _check(config, request)
    server = connect(request.address)
    submission = plan_submission(config, request, here=server.is_here)
    _send(server, submission)
    _tell(Console(), server, submission, request)
    return follow(server, submission.submission_id) if request.follow else 0


def plan_submission(config: RunConfig, request: SubmitRequest, *, here: bool) -> Submission:
    """The job for a checked recipe. `here`: the cluster's address is one of this machine. Raises JobError."""
    output_dir = _output_dir(config, request, here)
    run = str(Path(output_dir) / config.name)
    names = key_variables(config)
    key_files = {name: str(Path(path).expanduser().absolute()) for name in names if (path := key_file(name))}
    facts = provenance(seed=config.seed)
    commit = f"{(facts['git_commit'] or 'unknown')[:12]}{' with changes' if facts['git_dirty'] else ''}"
    acts = request.phase in ACTING_PHASES
    device = config.prm.device if request.phase == "train-prm" else config.rollout.engine.device
    return Submission(
        submission_id=f"{config.name}-{request.phase}-{time.strftime('%Y%m%d-%H%M%S')}",
        entrypoint=shlex.join([*COMMAND, *command_line(request, output_dir=output_dir, run=run)]),
        runtime_env=_runtime_env(request, key_files, commit, here),
        metadata={
            "phase": request.phase,
            "recipe": str(request.recipe),
            "name": config.name,
            "run": run,
            "version": facts["versions"].get("agentflow-ray", "unknown"),
            "commit": commit,
        },
        # A phase that acts in the driver itself must be where its engine can be; `train` asks for its actors' places.
        num_cpus=1.0 if acts else 0.0,
        num_gpus=1.0 if acts and device == "cuda" else 0.0,
        run=run,
        key_names=names,
        key_files=key_files,
    )


def command_line(request: SubmitRequest, *, output_dir: str, run: str) -> list[str]:
    """The arguments of `agentflow` on the cluster. Raises JobError for a recipe that does not travel."""
    if request.phase == "resume":
        return ["resume", run]
    recipe, folder = request.recipe.resolve(), request.working_dir.resolve()
    if not recipe.is_relative_to(folder):
        raise JobError(
            f"recipe '{request.recipe}' lies outside of the working directory '{folder}', which is all that travels; "
            "copy it there, or give the folder above it with --working-dir"
        )
    return [
        request.phase,
        str(recipe.relative_to(folder)),
        *(one for one in request.overrides if not one.startswith("output_dir=")),
        f"output_dir={output_dir}",
        *request.phase_options,
    ]


def _config(request: SubmitRequest) -> RunConfig:
    if request.phase == "resume" and request.recipe.is_dir():
        return begun_config(request.recipe)
    return load_run_config(request.recipe, request.overrides)


def _check(config: RunConfig, request: SubmitRequest) -> None:
    check_recipe(config)
    _check_nothing_secret_travels(request)
    _check_nothing_is_ignored(request)
    if request.phase == "label" or (request.phase == "train" and config.trains_prm):
        check_labelling(config)
    if not request.working_dir.is_dir():
        raise JobError(f"--working-dir '{request.working_dir}' is no folder")
    data = config.envs.data_path
    if data and not Path(data).is_absolute() and not (request.working_dir / data).is_file():
        raise JobError(
            f"envs.data_path = '{data}' is not in the working directory '{request.working_dir}'; copy it there, or "
            "give the absolute path that it has on every machine of the cluster"
        )
    for key, path in (("reward.credit.prm_path", config.reward.prm_path), ("model.path", config.model.path)):
        # A model hub's id has no file here, and the demo's model is a name.
        if path and path != "demo" and not Path(path).expanduser().is_absolute() and Path(path).exists():
            raise JobError(
                f"{key} = '{path}' does not travel: weights are left out of the working directory; give the absolute "
                "path that it has on every machine of the cluster"
            )


def _check_nothing_is_ignored(request: SubmitRequest) -> None:
    """A run that is resumed takes neither settings nor options: a recipe's only say which run it is. Raises
    JobError."""
    if request.phase != "resume":
        return
    if request.phase_options:
        raise JobError(f"`agentflow resume` takes no --options; leave {shlex.join(request.phase_options)} out")
    if request.recipe.is_dir() and request.overrides:
        raise JobError(
            f"the run in '{request.recipe}' goes on with its own settings; leave {' '.join(request.overrides)} out, or "
            "begin a run of another name=..."
        )


def _check_nothing_secret_travels(request: SubmitRequest) -> None:
    """Ray writes a job's environment to its logs on every machine, for all to read. Raises JobError where a key is in
    what --runtime-env adds."""
    own = request.runtime_env.get("env_vars", {})
    name = next(filter(names_a_secret, own), None) or written_secret(json.dumps(request.runtime_env, default=str))
    if name:
        raise JobError(
            f"--runtime-env holds {name}, and Ray writes a job's environment to logs that all users of its machines "
            f"can read; on the machines of the cluster {how_to_set(name)}"
        )


def _output_dir(config: RunConfig, request: SubmitRequest, here: bool) -> str:
    """Where the job writes: never below its working directory, which Ray removes."""
    written = Path(config.output_dir)
    if written.is_absolute():
        return str(written)
    if not here:
        raise JobError(
            f"output_dir = '{written}' is relative, and a job's working directory on the cluster does not last; give a "
            "folder there that does, e.g. output_dir=/mnt/shared/runs"
        )
    if request.phase == "resume" and request.recipe.is_dir():
        return str(request.recipe.resolve().parent)
    return str(request.working_dir.resolve() / written)


def _runtime_env(request: SubmitRequest, key_files: Mapping[str, str], commit: str, here: bool) -> dict[str, Any]:
    """The working directory and the environment, with what --runtime-env adds."""
    added = dict(request.runtime_env)
    own = added.pop("env_vars", {})
    files = {f"{name}{FILE_SUFFIX}": path for name, path in key_files.items()}
    env = {**WORKER_ENV, **files, "AGENTFLOW_COMMIT": commit, **own}
    if here and sys.prefix != sys.base_prefix:
        # Ray runs a job with whatever `python` it finds; a cluster on this machine should find the one that is used.
        env.setdefault("PATH", f"{sys.prefix}/bin:${{PATH}}")
    folder = request.working_dir.resolve()
    inside = [f"/{Path(path).relative_to(folder)}" for path in key_files.values() if Path(path).is_relative_to(folder)]
    return {
        "working_dir": str(folder),
        "excludes": [*LEFT_BEHIND, *inside, *added.pop("excludes", [])],
        "env_vars": env,
        **added,
    }


def _send(server: JobServer, submission: Submission) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    with server_errors(server.url):
        while True:
            try:
                server.client.submit_job(
                    entrypoint=submission.entrypoint,
                    submission_id=submission.submission_id,
                    runtime_env=dict(submission.runtime_env),
                    metadata=dict(submission.metadata),
                    entrypoint_num_cpus=submission.num_cpus,
                    entrypoint_num_gpus=submission.num_gpus,
                )
                return
            except RuntimeError as error:
                if STILL_STARTS not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(ASK_AGAIN_S)


def _tell(console: Console, server: JobServer, submission: Submission, request: SubmitRequest) -> None:
    name, at = submission.submission_id, f" --address {escape(request.address)}" if request.address else ""
    url = escape(server.url)
    lines = [
        f"[bold green]submitted[/] [bold]{name}[/] to {url}",
        f"  runs        {escape(submission.entrypoint)}",
        f"  run folder  {escape(submission.run)} (on the cluster's head node)",
        f"  watch       agentflow jobs logs {name} --follow{at}",
        f"  state       agentflow jobs {name}{at}",
        f"  stop        agentflow jobs stop {name}{at}",
        f"  dashboard   {url}/#/jobs/{name}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for key in submission.key_names:
        path = submission.key_files.get(key)
        there = (
            f"reads it from the file {path}" if path else f"needs {key}, or {key}{FILE_SUFFIX}, before its `ray start`"
        )
        console.print(f"[yellow]note[/] the key {key} does not travel: every machine {there}", soft_wrap=True)
