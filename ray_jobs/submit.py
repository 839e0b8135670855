"""Send a phase to a Ray cluster as a job: what is checked, packed and handed over."""

import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from actors.cluster import WORKER_ENV
from configs.loading import load_run_config
from configs.run import RunConfig
from ray_jobs.begun_run import begun_run
from ray_jobs.jobs_client import JobError, JobServer, connect, server_errors
from ray_jobs.jobs_watch import follow
from ray_jobs.preflight import check_labelling, check_recipe
from ray_jobs.run_folder import provenance
from ray_jobs.submit_options import ACTING_PHASES, SubmitOptions

COMMAND = ("python", "-m", "ray_jobs.cli")
"""What runs on the cluster: the code of the working directory, else what is installed there."""

LEFT_BEHIND = (
    *(".git/", ".venv/", "venv/", "runs/", ".cache/", "__pycache__/", "*.egg-info/", "node_modules/"),
    *(".pytest_cache/", ".mypy_cache/", ".ruff_cache/", ".hypothesis/", ".env", "*.safetensors", "*.gguf", "*.ckpt"),
)
"""Never part of the working directory, besides what .gitignore and .rayignore say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job as the cluster gets it. `missing_keys` are variables that the recipe names and that are not set here."""

    submission_id: str
    entrypoint: str
    runtime_env: Mapping[str, Any]
    metadata: Mapping[str, str]
    num_cpus: float
    num_gpus: float
    run: str
    missing_keys: tuple[str, ...]


def run_submit(options: SubmitOptions) -> int:
    """Check, pack and submit; with `follow`, print the log until the job has ended. Returns the exit code. Raises
    ConfigError, PreflightError and JobError before anything reaches the cluster."""
    config = _config(options)
    _check(config, options)
    server = connect(options.address)
    submission = plan_submission(config, options, here=server.is_here)
    _send(server, submission)
    _tell(Console(), server, submission, options)
    return follow(server, submission.submission_id) if options.follow else 0


def plan_submission(config: RunConfig, options: SubmitOptions, *, here: bool) -> Submission:
    """The job for a checked recipe. `here`: the cluster's address is one of this machine. Raises JobError."""
    output_dir = _output_dir(config, options, here)
    run = str(Path(output_dir) / config.name)
    names = key_variables(config)
    keys = {name: value for name in names if (value := os.environ.get(name, "").strip())}
    facts = provenance(seed=config.seed)
    commit = f"{(facts['git_commit'] or 'unknown')[:12]}{' with changes' if facts['git_dirty'] else ''}"
    on_gpu = options.phase in ACTING_PHASES and _device(config, options.phase) == "cuda"
    return Submission(
        submission_id=f"{config.name}-{options.phase}-{time.strftime('%Y%m%d-%H%M%S')}",
        entrypoint=shlex.join([*COMMAND, *command_line(options, output_dir=output_dir, run=run)]),
        runtime_env=_runtime_env(options, {**keys, "AGENTFLOW_COMMIT": commit}, here),
        metadata={
            "phase": options.phase,
            "recipe": str(options.recipe),
            "name": config.name,
            "run": run,
            "version": facts["versions"].get("agentflow-ray", "unknown"),
            "commit": commit,
        },
        # A phase that acts in the driver itself must be where its engine can be; `train` asks for its actors' places.
        num_cpus=1.0 if options.phase in ACTING_PHASES else 0.0,
        num_gpus=1.0 if on_gpu else 0.0,
        run=run,
        missing_keys=tuple(name for name in names if name not in keys),
    )


def command_line(options: SubmitOptions, *, output_dir: str, run: str) -> list[str]:
    """The arguments of `agentflow` on the cluster. Raises JobError for a recipe that does not travel."""
    if options.phase == "resume":
        return ["resume", run]
    recipe, folder = options.recipe.resolve(), options.working_dir.resolve()
    if not recipe.is_relative_to(folder):
        raise JobError(
            f"recipe '{options.recipe}' lies outside of the working directory '{folder}', which is all that travels; "
            "copy it there, or give the folder above it with --working-dir"
        )
    return [
        options.phase,
        str(recipe.relative_to(folder)),
        *(one for one in options.overrides if not one.startswith("output_dir=")),
        f"output_dir={output_dir}",
        *options.phase_options,
    ]


def key_variables(config: RunConfig) -> tuple[str, ...]:
    """The environment variables with keys that this recipe names, by itself or by the tools that it switches on."""
    from envs.tools import google_search, tavily_search

    named = _values_of(config.model_dump(), "api_key_env")
    envs = config.envs
    finders = {envs.web.finder} if "web_search" in envs.actions else set()
    if ("search" in envs.actions and envs.search == "tavily") or "tavily" in finders:
        named.append(tavily_search.API_KEY_VARIABLE)
    if "google_search" in envs.actions or "google" in finders:
        named += [google_search.API_KEY_VARIABLE, google_search.ENGINE_VARIABLE]
    return tuple(dict.fromkeys(named))


def _config(options: SubmitOptions) -> RunConfig:
    if options.phase == "resume" and options.recipe.is_dir():
        return begun_run(options.recipe)[0]
    return load_run_config(options.recipe, options.overrides)


def _check(config: RunConfig, options: SubmitOptions) -> None:
    check_recipe(config)
    if options.phase in ("pipeline", "label"):
        check_labelling(config)
    if not options.working_dir.is_dir():
        raise JobError(f"--working-dir '{options.working_dir}' is no folder")
    data = config.envs.data_path
    if data and not Path(data).is_absolute() and not (options.working_dir / data).is_file():
        raise JobError(
            f"envs.data_path = '{data}' is not in the working directory '{options.working_dir}'; copy it there, or "
            "give the absolute path that it has on every machine of the cluster"
        )
    for key, path in (("reward.prm_path", config.reward.prm_path), ("model.path", config.model.path)):
        # A model hub's id has no file here.
        if path and not Path(path).expanduser().is_absolute() and Path(path).exists():
            raise JobError(
                f"{key} = '{path}' does not travel: weights are left out of the working directory; give the absolute "
                "path that it has on every machine of the cluster"
            )


def _output_dir(config: RunConfig, options: SubmitOptions, here: bool) -> str:
    """Where the job writes: never below its working directory, which Ray removes."""
    written = Path(config.output_dir).expanduser()
    if written.is_absolute():
        return str(written)
    if not here:
        raise JobError(
            f"output_dir = '{written}' is relative, and a job's working directory on the cluster does not last; give a "
            "folder there that does, e.g. output_dir=/mnt/shared/runs"
        )
    return str(options.working_dir.resolve() / written)


def _runtime_env(options: SubmitOptions, env_vars: Mapping[str, str], here: bool) -> dict[str, Any]:
    """The working directory and the environment, with what --runtime-env adds."""
    added = dict(options.runtime_env)
    env = {**WORKER_ENV, **env_vars, **added.pop("env_vars", {})}
    if here and sys.prefix != sys.base_prefix:
        # Ray runs a job with whatever `python` it finds; a cluster on this machine should find the one that is used.
        env.setdefault("PATH", f"{sys.prefix}/bin:${{PATH}}")
    return {
        "working_dir": str(options.working_dir.resolve()),
        "excludes": [*LEFT_BEHIND, *added.pop("excludes", [])],
        "env_vars": env,
        **added,
    }


def _send(server: JobServer, submission: Submission) -> None:
    with server_errors(server.url):
        server.client.submit_job(
            entrypoint=submission.entrypoint,
            submission_id=submission.submission_id,
            runtime_env=dict(submission.runtime_env),
            metadata=dict(submission.metadata),
            entrypoint_num_cpus=submission.num_cpus,
            entrypoint_num_gpus=submission.num_gpus,
        )


def _tell(console: Console, server: JobServer, submission: Submission, options: SubmitOptions) -> None:
    name, at = submission.submission_id, f" --address {options.address}" if options.address else ""
    lines = [
        f"[bold green]submitted[/] [bold]{name}[/] to {server.url}",
        f"  runs        {submission.entrypoint}",
        f"  run folder  {submission.run} (on the cluster's head node)",
        f"  watch       agentflow logs {name} --follow{at}",
        f"  state       agentflow status {name}{at}",
        f"  stop        agentflow stop {name}{at}",
        f"  dashboard   {server.url}/#/jobs/{name}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for key in submission.missing_keys:
        console.print(f"[yellow]note[/] {key} is not set here: the job needs it from the cluster", soft_wrap=True)


def _device(config: RunConfig, phase: str) -> str:
    return config.prm.device if phase == "train-prm" else config.rollout.engine.device


def _values_of(table: Mapping[str, Any], key: str) -> list[str]:
    found: list[str] = []
    for name, value in table.items():
        if name == key and value:
            found.append(value)
        elif isinstance(value, Mapping):
            found += _values_of(value, key)
    return found
