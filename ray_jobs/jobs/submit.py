"""Send a phase to a Ray cluster as a job: what is checked, packed and handed over."""

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE
from rich.console import Console
from rich.markup import escape

from actors.cluster import WORKER_ENV
from configs.api_keys import FILE_SUFFIX, certain_key, how_to_set, key_file, names_a_secret, written_secret
from configs.loading import load_run_config
from configs.run import RunConfig
from ray_jobs.checks.keys import check_nothing_secret_is_written, key_variables
from ray_jobs.jobs.client import JobError, JobServer, connect, server_errors, without_user
from ray_jobs.jobs.request import ACTING_PHASES, SubmitRequest
from ray_jobs.jobs.travel import check_travels, excluded, largest, recipe_there
from ray_jobs.jobs.watch import follow
from ray_jobs.run.begun import begun_config
from ray_jobs.run.preflight import check_labelling, check_recipe
from ray_jobs.run.provenance import provenance

COMMAND = ("python", "-m", "ray_jobs.cli")
"""What runs on the cluster: the code of the working directory, else what is installed there."""

UNKNOWN_CODE = "as on the cluster"
"""Version and commit of a job whose code does not travel."""
READ_INTO_IT = ("pip", "uv", "conda", "packages")
"""Entries of a job's environment that may name a file here."""
STILL_STARTS = "No available agent to submit job"
"""What a job server answers whose nodes' agents are not up yet, some seconds after `ray start`."""
STARTS_WITHIN_S, ASK_AGAIN_S = 60.0, 1.0
TOO_LARGE = ("Maximum request body size", "HTTPRequestEntityTooLarge", "status code 413", "exceeds the maximum size")
"""What a job server, or a proxy before it, answers to a working directory that is too large."""


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
    UserError, PreflightError and JobError before anything reaches the cluster."""
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
    version = facts["versions"].get("agentflow-ray", "unknown")
    if Path(__file__).resolve().parents[2] != request.working_dir.resolve():
        # Other code runs there than this: what the working directory has, or the cluster.
        commit = version = UNKNOWN_CODE
    return Submission(
        submission_id=f"{config.name}-{request.phase}-{time.strftime('%Y%m%d-%H%M%S')}",
        entrypoint=shlex.join([*COMMAND, *command_line(request, output_dir=output_dir, run=run)]),
        runtime_env=_runtime_env(request, key_files, commit, here),
        metadata={
            "phase": request.phase,
            "recipe": str(request.recipe),
            "name": config.name,
            "run": run,
            "version": version,
            "commit": commit,
        },
        # A phase that acts in the driver itself must be where its engine can be; `train` asks for its actors' places.
        num_cpus=1.0 if acts else 0.0,
        num_gpus=_cards(config, request.phase) if acts else 0.0,
        run=run,
        key_names=names,
        key_files=key_files,
    )


def command_line(request: SubmitRequest, *, output_dir: str, run: str) -> list[str]:
    """The arguments of `agentflow` on the cluster. Raises JobError for a recipe that does not travel."""
    if request.phase == "resume":
        return ["resume", run]
    return [
        request.phase,
        recipe_there(request),
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
    _check_nothing_secret_travels(config, request)
    _check_nothing_is_ignored(request)
    if request.phase == "label" or (request.phase == "train" and config.trains_prm):
        check_labelling(config)
    check_travels(config, request)


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


def _check_nothing_secret_travels(config: RunConfig, request: SubmitRequest) -> None:
    """Ray writes a job's environment to its logs on every machine, for all to read. Raises JobError where a key is in
    what --runtime-env adds, and ApiKeyError where one is in the job's command."""
    check_nothing_secret_is_written(config, (*request.overrides, *request.phase_options))
    added = request.runtime_env
    text = "\n".join(_texts(added))
    name = next(filter(names_a_secret, added.get("env_vars", {})), None)
    name = name or written_secret(text, key_variables(config))
    where = None if name else certain_key(text)
    if name is None and where is None:
        return
    # Only a key that is asked for by its name may lie in a file; what another library reads is not ours to say.
    there = how_to_set(name) if name in key_variables(config) else f"set {name or 'it'} in the environment"
    raise JobError(
        f"--runtime-env holds {name or f'a key {where}'}, and Ray writes a job's environment to logs that all users of "
        f"its machines can read; on the machines of the cluster {there}, before their `ray start`"
    )


def _texts(value: object) -> Iterator[str]:
    """Every text in what --runtime-env adds, also in files of requirements, which Ray reads into it."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield str(name)
            yield from _texts(one)
            if name in READ_INTO_IT and isinstance(one, str) and Path(one).is_file():
                yield Path(one).read_text(encoding="utf-8", errors="replace")
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)
    else:
        yield str(value)


def _output_dir(config: RunConfig, request: SubmitRequest, here: bool) -> str:
    """Where the job writes: never below its working directory, which Ray removes."""
    written = Path(config.output_dir)
    if written.is_absolute():
        return str(written)
    if request.phase == "resume" and request.recipe.is_dir():
        return str(request.recipe.resolve().parent)
    if not here:
        raise JobError(
            f"output_dir = '{written}' is relative, and a job's working directory on the cluster does not last; give a "
            "folder there that does, e.g. output_dir=/mnt/shared/runs"
        )
    return str(request.working_dir.resolve() / written)


def _runtime_env(request: SubmitRequest, key_files: Mapping[str, str], commit: str, here: bool) -> dict[str, Any]:
    """The working directory and the environment, with what --runtime-env adds."""
    added = dict(request.runtime_env)
    own = added.pop("env_vars", {})
    taken_out = added.pop("excludes", [])
    files = {f"{name}{FILE_SUFFIX}": path for name, path in key_files.items()}
    env = {**WORKER_ENV, **files, **({} if commit == UNKNOWN_CODE else {"AGENTFLOW_COMMIT": commit}), **own}
    if here and sys.prefix != sys.base_prefix:
        # Ray runs a job with whatever `python` it finds; a cluster on this machine should find the one that is used.
        env.setdefault("PATH", f"{sys.prefix}/bin:${{PATH}}")
    folder = request.working_dir.resolve()
    return {
        "working_dir": str(folder),
        "excludes": excluded(folder, taken_out, key_files.values()),
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
                if any(sign in str(error) for sign in TOO_LARGE):
                    raise _too_large(submission) from error
                if STILL_STARTS not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(ASK_AGAIN_S)


def _too_large(submission: Submission) -> JobError:
    folder = Path(submission.runtime_env["working_dir"])
    return JobError(
        f"the working directory '{folder}' is larger, packed, than the {DASHBOARD_CLIENT_MAX_SIZE / 2**20:.0f} MiB "
        f"that Ray takes; its largest files: {largest(folder, submission.runtime_env['excludes'])}; name in .rayignore "
        "what the job does not need, or put it where all machines see it"
    )


def _tell(console: Console, server: JobServer, submission: Submission, request: SubmitRequest) -> None:
    name = submission.submission_id
    at = f" --address {escape(without_user(request.address))}" if request.address else ""
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


def _cards(config: RunConfig, phase: str) -> float:
    """What a phase takes that acts in the job's own process."""
    if phase == "train-prm":
        return float(config.prm.device == "cuda")
    samples = {"label": config.label.type == "monte_carlo", "evaluate": config.backend.type == "vllm"}
    engine = config.rollout.engine
    return float(engine.tensor_parallel) if engine.device == "cuda" and samples.get(phase, True) else 0.0
