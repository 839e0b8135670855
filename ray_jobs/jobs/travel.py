"""What of a working directory travels to a cluster, and what a recipe and a command need of it there."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE, get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import _get_excludes, get_excludes_from_ignore_files

from configs.api_keys import secret_files
from configs.learner import FileConfig
from configs.rollout import FolderMemoryConfig
from configs.run import RunConfig
from ray_jobs.jobs.client import JobError
from ray_jobs.jobs.request import SubmitRequest

LEFT_BEHIND = (
    *(".git/", ".venv/", "venv/", "runs/", ".cache/", "__pycache__/", "*.egg-info/", "node_modules/"),
    *(".pytest_cache/", ".mypy_cache/", ".ruff_cache/", ".hypothesis/", "*.safetensors", "*.gguf", "*.ckpt"),
    *(".env", ".env.*", "*.env", ".netrc", "*.pem", "*.key"),
)
"""Never part of the working directory, besides what .gitignore and .rayignore say: Ray keeps a copy of it."""

LARGEST_SHOWN = 3
LASTING = {"--out": "/mnt/shared/results", "--adapter": "/mnt/shared/runs/mine"}
"""Options of phases that name a folder outside of the working directory, with one that a cluster has."""

Leaves = Callable[[Path], bool]


def excluded(folder: Path, added: Sequence[str], key_files: Iterable[str] = ()) -> list[str]:
    """Patterns of what stays here, with those that --runtime-env adds. Ours come last and so have the last word: what
    is taken in again (`!src`) brings no file of secrets with it. `key_files` are in no environment by a telling
    name."""
    return [*added, *LEFT_BEHIND, *_key_files_in(folder, key_files)]


def check_travels(config: RunConfig, request: SubmitRequest) -> None:
    """Whether the job finds there what it reads, and what it writes lasts. Raises JobError."""
    if not request.working_dir.is_dir():
        raise JobError(f"--working-dir '{request.working_dir}' is no folder")
    if request.phase == "resume":
        return
    _check_recipe(request)
    _check_read(config, request)
    _check_weights(config)
    _check_written(config)
    _check_options(request)


def recipe_there(request: SubmitRequest) -> str:
    """The recipe as the job names it. Raises JobError for one that does not travel."""
    recipe, folder = request.recipe.resolve(), request.working_dir.resolve()
    if not recipe.is_relative_to(folder):
        raise JobError(
            f"recipe '{request.recipe}' lies outside of the working directory '{folder}', which is all that travels; "
            "copy it there, or give the folder above it with --working-dir"
        )
    return str(recipe.relative_to(folder))


def largest(folder: Path, patterns: Sequence[str]) -> str:
    """The largest files that travel, with their sizes, in words."""
    sizes = sorted(((path.stat().st_size, path) for path in _travelling(folder, patterns)), reverse=True)
    shown = [f"{path.relative_to(folder)} ({size / 2**20:.1f} MiB)" for size, path in sizes[:LARGEST_SHOWN]]
    return ", ".join(shown) or "none"


def _check_recipe(request: SubmitRequest) -> None:
    there = recipe_there(request)
    if request.recipe.exists() and _stays(request, there):
        raise JobError(
            f"recipe '{request.recipe}' does not travel: .gitignore, .rayignore or what is always left behind (such as "
            "runs/) names it; copy it to another place in the working directory"
        )


def _check_read(config: RunConfig, request: SubmitRequest) -> None:
    for key, path in _files_read(config):
        if not path or Path(path).is_absolute():
            continue
        if os.path.normpath(path).startswith(os.pardir) or not (request.working_dir / path).is_file():
            raise JobError(
                f"{key} = '{path}' is not in the working directory '{request.working_dir}'; copy it there, or "
                "give the absolute path that it has on every machine of the cluster"
            )
        if _stays(request, path):
            raise JobError(
                f"{key} = '{path}' does not travel: .gitignore, .rayignore or what is always left behind (such as "
                "runs/) names it; give the absolute path that it has on every machine of the cluster"
            )


def _files_read(config: RunConfig) -> Iterator[tuple[str, str | None]]:
    yield "envs.data_path", config.envs.data_path
    yield "envs.web.blocked_questions", config.envs.web.blocked_questions
    yield "collect.aime_test_path", config.collect.aime_test_path
    if config.envs.recording.mode == "replay":
        yield "envs.recording.path", config.envs.recording.path
    if isinstance(config.cold_start, FileConfig):
        yield "cold_start.path", config.cold_start.path


def _check_weights(config: RunConfig) -> None:
    weights = [("model.path", config.model.path), ("prm.model_path", config.prm.model_path)]
    # A model hub's id has no file here, and the demo's model is a name.
    named = [(key, path) for key, path in weights if path != "demo" and Path(path).exists()]
    for key, path in [*named, ("reward.credit.prm_path", config.reward.prm_path)]:
        if path and not Path(path).expanduser().is_absolute():
            raise JobError(
                f"{key} = '{path}' does not travel: weights are left out of the working directory; give the absolute "
                "path that it has on every machine of the cluster"
            )


def _check_written(config: RunConfig) -> None:
    recording = config.envs.recording
    written = [("envs.recording.path", recording.path)] if recording.mode == "record" else []
    if isinstance(config.planner.memory, FolderMemoryConfig):
        written.append(("agent.memory.path", config.planner.memory.path))
    for key, path in written:
        if path and not Path(path).is_absolute():
            raise JobError(
                f"{key} = '{path}' is relative, and a job's working directory on the cluster does not last; give a "
                f"path there that does, e.g. {key}=/mnt/shared/{Path(path).name}"
            )


def _check_options(request: SubmitRequest) -> None:
    words = [part for word in request.phase_options for part in word.split("=", 1)]
    for name, value in pairwise(words):
        if name in LASTING and value != "none" and not Path(value).expanduser().is_absolute():
            raise JobError(
                f"--options: {name} {value} is relative, and runs and results are not in a job's working directory on "
                f"the cluster, which does not last; give a path there that does, e.g. {name} {LASTING[name]}"
            )


def _stays(request: SubmitRequest, path: str) -> bool:
    """Whether a file of the working directory is left behind, as Ray decides it."""
    folder = request.working_dir.resolve()
    patterns = excluded(folder, request.runtime_env.get("excludes", ()))
    leaves = [_named(folder, patterns)]
    place = folder
    for part in Path(path).parts:
        leaves += _ignored_in(place)
        place /= part
        if any(one(place) for one in leaves):
            return True
    return False


def _travelling(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    return _below(folder, [_named(folder, patterns)])


def _below(place: Path, leaves: Sequence[Leaves]) -> Iterator[Path]:
    leaves = [*leaves, *_ignored_in(place)]
    for path in place.iterdir():
        if any(one(path) for one in leaves):
            continue
        if path.is_dir():
            yield from _below(path, leaves)
        elif path.is_file():
            yield path


def _named(folder: Path, patterns: Sequence[str]) -> Leaves:
    """Whether these patterns, or those that Ray always has, name a path."""
    return _get_excludes(folder, [*get_runtime_env_default_excludes(), *patterns])


def _ignored_in(folder: Path) -> list[Leaves]:
    with_git = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    return list(get_excludes_from_ignore_files(folder, include_gitignore=with_git))


def _key_files_in(folder: Path, others: Iterable[str]) -> list[str]:
    """Patterns of the files in the working directory that these paths or variables of this environment name as those
    of a key."""
    found: set[str] = set()
    for path in (Path(value).expanduser().absolute() for value in [*secret_files().values(), *others]):
        # As it is named, and where links of folders or its own lead: each may be the one that would be packed.
        for place in (path, path.parent.resolve() / path.name, path.resolve()):
            if place != folder and place.is_relative_to(folder):
                found.add("/" + re.sub(r"([\\\[\]!*#?])", r"\\\1", str(place.relative_to(folder))))
    return sorted(found)
