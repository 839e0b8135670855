"""What a submitted job's package holds: the files that Ray uploads, no keys, and all that the recipe names."""

import logging
import os
import re
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE, get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

from configs.api_keys import key_in_file
from configs.errors import UserError
from configs.run import RunConfig
from ray_jobs.run.preflight import leaves

CACHES = (
    *(".git/", ".venv/", "venv/", "runs/", ".cache/", "__pycache__/", "*.egg-info/", "node_modules/"),
    *(".pytest_cache/", ".mypy_cache/", ".ruff_cache/", ".hypothesis/"),
)
WEIGHTS = ("*.safetensors", "*.gguf", "*.ckpt")
KEY_NAMES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf", ".boto"),
    *(".s3cfg", ".git-credentials", ".vault-token", ".htpasswd", ".dockercfg", ".modal.toml", "rclone.conf"),
    *(".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", ".huggingface", ".ray", ".kaggle", "gcloud"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", "kubeconfig", "kaggle.json"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "auth_token", "hf_token*", "token", "token.*"),
    *("credentials", "credentials.*", "*.credentials", "secrets", "secrets.*", "*_credentials.json"),
    *("service-account*", "service_account*", "client_secret*"),
)
"""Names of files and folders that usually hold keys, in any case."""
_ANY_CASE = [re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", name) for name in KEY_NAMES]
LEFT_BEHIND = (*CACHES, *WEIGHTS, *_ANY_CASE)
"""Never uploaded, in addition to what .gitignore and .rayignore exclude: Ray keeps a copy of the working directory."""

_CACHE_NAMES = {name.strip("/") for name in CACHES}
_NAMING = {
    *("blocked_questions", "prm_path", "path", "model_path"),
    *("function", "source", "scorer", "turn_scorer", "command"),
}
"""Last names of the settings that may name files or modules."""
_SEPARATORS = re.compile(r"[\s='\"#]+")


def travelling(folder: Path, excludes: Sequence[str]) -> set[Path]:
    """Return the files that Ray packs of a folder; it asks each folder's own ignore files about the folder itself."""
    found: list[Path] = []
    left_out = [_get_excludes(folder, [*get_runtime_env_default_excludes(), *excludes])]
    gitignore = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    _dir_travel(folder, left_out, found.append, include_gitignore=gitignore, logger=logging.getLogger(__name__))
    return {path for path in found if path.is_file()}


def check_no_key_travels(files: Iterable[Path]) -> None:
    """Raise UserError for a file that seems to hold a key; the message names the file and the line, not the key."""
    for file in sorted(files):
        if found := key_in_file(file):
            raise UserError(
                f"'{file}', line {found[0]}, seems to hold a key ({found[1]}), and would be uploaded; take it out, or "
                "leave the file behind: name it in .rayignore or in the excludes of --runtime-env"
            )


def check_named_files(config: RunConfig, options: Sequence[str], folder: Path, files: Set[Path]) -> None:
    """Check that what settings and options name in the folder, or beside the recipe, is among the `files` that travel.

    Files and modules that exist nowhere are left to the checks of the job. Absolute paths are the cluster's.
    """
    places = {Path(config.code_path or folder).resolve(), folder}
    named = [
        (setting, value)
        for setting, value in leaves(config.model_dump(mode="json"))
        if setting.rpartition(".")[2] in _NAMING and isinstance(value, str) and setting != "agent.memory.path"
    ]
    for setting, value in [*named, *(("--options", option) for option in options)]:
        for word in _SEPARATORS.split(value.removeprefix("mcp:")):
            for file in sorted(file for place in places for file in _files_of(word, place)):
                check_file_travels(setting, file, folder, files)


def _files_of(word: str, place: Path) -> Sequence[Path]:
    """Return the files of a module or package, or the file, or all files of a folder but its caches."""
    module, path = place / word.partition(":")[0].replace(".", "/"), Path(os.path.normpath(place / word))
    if Path(word).is_absolute() or place.is_relative_to(path):
        return []
    files = [Path(f"{module}.py"), module / "__init__.py", module / "__main__.py", path]
    if found := [file for file in files if os.path.isfile(file)]:
        return found
    below = [file for file in path.rglob("*") if file.is_file()] if os.path.isdir(path) else []
    return [file for file in below if _CACHE_NAMES.isdisjoint(file.relative_to(path).parts)]


def check_file_travels(setting: str, file: Path, folder: Path, files: Set[Path]) -> None:
    """Raise UserError if a file that a setting names does not travel."""
    if file not in files:
        raise UserError(
            f"{setting}: the job needs '{os.path.relpath(file, folder)}' of --working-dir '{folder}', which is left "
            "behind; see .gitignore, .rayignore and the excludes of --runtime-env (runs, weights and names of key "
            "files never travel), or give data as the absolute path of a folder that the cluster's machines share"
        )
