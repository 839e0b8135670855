"""What a submitted job's package holds: the files that Ray uploads, no keys, and all that the recipe names."""

import logging
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import pairwise
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
_DATA = {"data_path", "blocked_questions", "prm_path"}
_NAMING = {*_DATA, "path", "model_path", "function", "source", "scorer", "turn_scorer", "command"}
"""Last names of the settings that may name files or modules."""
_IMPORT_PATH = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The files of a working directory that travel, and the checks that they are all that a job needs."""

    folder: Path
    files: set[Path]
    code: Path
    """Folder of the recipe, which is searched for code before `folder`."""
    installs: bool
    """Whether the job installs packages, which may have the modules that are missing here."""

    def check(self, config: RunConfig, options: Sequence[str]) -> None:
        """Check the files and modules that the settings and the phase's options name."""
        for setting, value in leaves(config.model_dump(mode="json")):
            name = setting.rpartition(".")[2]
            if not isinstance(value, str) or name not in _NAMING or setting == "agent.memory.path":
                continue
            if name in _DATA:
                self._check_path(setting, value, self.folder)
            elif name == "command" or value.startswith("mcp:"):
                with suppress(ValueError):  # the check of the command itself says why
                    words = shlex.split(value.removeprefix("mcp:").partition("#")[0])
                    self._check_words(setting, words, (self.code, self.folder))
            elif (module := _IMPORT_PATH.fullmatch(value)) and module[1] != "hf":
                self._check_module(setting, module[1])
            else:
                self._check_words(setting, [value], (self.folder,))
        self._check_words("--options", options, (self.folder,))

    def check_file(self, setting: str, file: Path) -> None:
        """Raise UserError if a file of the folder does not travel."""
        if file not in self.files:
            raise UserError(
                f"{setting}: the job needs '{os.path.relpath(file, self.folder)}' of --working-dir '{self.folder}', "
                f"which {'is left behind' if file.exists() else 'does not exist'}; see .gitignore, .rayignore and the "
                "excludes of --runtime-env (runs, weights and names of key files never travel), or give data as the "
                "absolute path of a folder that the cluster's machines share"
            )

    def _check_words(self, setting: str, words: Sequence[str], places: Sequence[Path]) -> None:
        """Check the words that are modules, scripts or existing files; any other word is no name."""
        for before, word in pairwise(["", *words]):
            if before == "-m":
                self._check_module(setting, word)
                continue
            for part in word.split("=", 1):
                place = next((place for place in places if os.path.exists(place / part)), self.folder)
                is_script = Path(part).suffix in (".py", ".sh") and "://" not in part
                if is_script or os.path.exists(part) or os.path.exists(place / part):
                    self._check_path(setting, part, place)

    def _check_path(self, setting: str, value: str, place: Path) -> None:
        """Check a file, or all of a folder but its caches. Absolute paths are the cluster's."""
        path = Path(os.path.normpath(place / value))
        if Path(value).is_absolute() or self.code.is_relative_to(path) or self.folder.is_relative_to(path):
            return
        below = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
        wanted = {file for file in below if _CACHE_NAMES.isdisjoint(file.relative_to(path).parts)} or {path}
        for file in sorted(wanted):
            self.check_file(setting, file)

    def _check_module(self, setting: str, name: str) -> None:
        """Check that a module travels with the packages around it, or is installed."""
        places = [self.code, self.folder]
        files = [*_module_files(name, places), *_module_files(f"{name}.__main__", places)]
        for file in files:
            self.check_file(setting, file)
        if not files and not self.installs:
            elsewhere = [entry for entry in sys.path if Path(entry).resolve() not in (*places, Path.cwd())]
            if not any(finder.find_spec(name.partition(".")[0], elsewhere) for finder in sys.meta_path):
                raise UserError(
                    f"{setting}: module '{name}' is neither in --working-dir '{self.folder}', nor beside the recipe, "
                    "nor installed; put it there, or name its package in the pip or py_modules of --runtime-env"
                )


def _module_files(name: str, places: Iterable[Path]) -> list[Path]:
    """Return the files that importing `a.b.c` of these places runs; none if there is no such module."""
    search, files = [*map(str, places)], []
    for part in name.split("."):
        if (spec := PathFinder.find_spec(part, search)) is None:
            return []
        files += [Path(spec.origin)] if spec.origin else []
        search = [*(spec.submodule_search_locations or ())]
    return files
