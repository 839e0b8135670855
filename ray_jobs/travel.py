"""What a submitted job's package holds: the files that Ray uploads, no keys, and all that the recipe names."""

import ast
import logging
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path

from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE, get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

from configs import PACKAGES
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
_LETTER = re.compile("[a-z]")
LEFT_BEHIND = (
    *CACHES,
    *WEIGHTS,
    *(_LETTER.sub(lambda letter: f"[{letter[0]}{letter[0].upper()}]", name) for name in KEY_NAMES),
)
"""Never uploaded, in addition to what .gitignore and .rayignore exclude: Ray keeps a copy of the working directory."""

_CACHE_NAMES = {name.strip("/") for name in CACHES}
_PATHS = {"data_path", "blocked_questions", "prm_path", "path"}
_FUNCTIONS = {"function", "source", "scorer", "turn_scorer"}
_IMPORT_PATH = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")


def travelling(folder: Path, excludes: Sequence[str]) -> set[Path]:
    """Return the files that Ray packs of a folder; it asks each folder's own ignore files about the folder itself."""
    found: list[Path] = []
    _dir_travel(
        folder,
        [_get_excludes(folder, [*get_runtime_env_default_excludes(), *excludes])],
        found.append,
        include_gitignore=os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1",
        logger=logging.getLogger("ray.quiet"),
    )
    return {path for path in found if path.is_file()}


def check_no_key_travels(files: Iterable[Path]) -> None:
    """Raise UserError for a file that seems to hold a key; the message names the file and the line, not the key."""
    for file in sorted(files):
        if found := key_in_file(file):
            line, where = found
            raise UserError(
                f"'{file}', line {line}, seems to hold a key ({where}), and would be uploaded; take the key out, or "
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

    def check(self, config: RunConfig, words: Sequence[str]) -> None:
        """Check what the settings name by path or import, and the files among the words of the phase's options.

        Absolute paths are those of the cluster's machines. Raises UserError.
        """
        for setting, value in leaves(config.model_dump(mode="json")):
            name = setting.rpartition(".")[2]
            if not isinstance(value, str) or setting == "agent.memory.path":
                continue
            if setting == "model.path" or name == "model_path":
                self._check_if_there(setting, value)  # any other text is a model of the hub
            elif name in _PATHS:
                self._check_path(setting, value)
            elif name == "command":
                self._check_command(setting, value)
            elif name == "source" and value.startswith("mcp:") and "://" not in value:
                self._check_command(setting, value.removeprefix("mcp:").partition("#")[0])
            elif name in _FUNCTIONS and (function := _IMPORT_PATH.fullmatch(value)):
                self._check_module(setting, function[1])
        for word in _parts(words):
            self._check_if_there("--options", word)

    def check_file(self, setting: str, file: Path) -> None:
        """Raise UserError if a file of the folder does not travel."""
        if file not in self.files:
            raise UserError(
                f"{setting}: the job needs '{os.path.relpath(file, self.folder)}' of --working-dir '{self.folder}', "
                f"which {'is left behind' if file.exists() else 'does not exist'}; see .gitignore, .rayignore and the "
                "excludes of --runtime-env (runs, weights and names of key files never travel), or give data as the "
                "absolute path of a folder that the cluster's machines share"
            )

    def _check_if_there(self, setting: str, value: str) -> None:
        if (self.folder / value).exists() or Path(value).exists():
            self._check_path(setting, value)

    def _check_path(self, setting: str, value: str) -> None:
        """Check a file, or all of a folder but its caches."""
        path = Path(os.path.normpath(self.folder / value))
        if Path(value).is_absolute():
            return
        below = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else []
        wanted = [file for file in below if _CACHE_NAMES.isdisjoint(file.relative_to(path).parts)]
        for file in wanted or [path]:
            self.check_file(setting, file)

    def _check_command(self, setting: str, command: str) -> None:
        """Check the words of a command that are files, and the modules that its scripts and `-m` import."""
        try:
            words = shlex.split(command)
        except ValueError:
            return  # the check of the command itself says why
        for before, word in pairwise(["", *words]):
            if before == "-m":
                self._check_module(setting, word)
                continue
            for part in (part for part in _parts([word]) if not Path(part).is_absolute()):
                place = next((place for place in (self.code, self.folder) if (place / part).exists()), self.folder)
                if (place / part).exists() or Path(part).exists() or Path(part).suffix in (".py", ".sh"):
                    self._check_path(setting, os.path.relpath(place / part, self.folder))
                    if Path(part).suffix == ".py":
                        self._check_imports(setting, place / part, [(place / part).parent])

    def _check_module(self, setting: str, name: str) -> None:
        """Check that a module travels with what it imports of the working directory, or is installed."""
        places = [self.code, self.folder]
        top = name.partition(".")[0]
        if top in PACKAGES:
            return
        files = _module_files(name, places)
        if files and name.rpartition(".")[2] in (files[-1].name.partition(".")[0], files[-1].parent.name):
            for file in files:
                self._check_imports(setting, file, places)
        elif not self.installs and not _is_installed(top, [*places, Path.cwd()]):
            raise UserError(
                f"{setting}: module '{name}' is neither in --working-dir '{self.folder}', nor beside the recipe there, "
                "nor installed; put it there, or name its package in the pip or py_modules of --runtime-env"
            )

    def _check_imports(self, setting: str, file: Path, places: Sequence[Path]) -> None:
        """Check a source file and, in turn, what it imports of these places."""
        todo, seen = [file], {file}
        while todo:
            self.check_file(setting, file := todo.pop())
            for name in _imported(file, places):
                new = {one for one in _module_files(name, places) if one not in seen}
                seen |= new
                todo += sorted(new)


def _parts(words: Iterable[str]) -> Iterator[str]:
    """Yield the words and their parts around `=`, without options."""
    parts = chain.from_iterable(word.split("=", 1) for word in words)
    return (part for part in parts if part and not part.startswith("-"))


def _module_files(name: str, places: Iterable[Path]) -> list[Path]:
    """Return the files that importing `a.b.c` runs, of the first place that has `a`; without what is no module."""
    for place in places:
        files: list[Path] = []
        base = place
        for part in name.split("."):
            base /= part
            init, modules = base / "__init__.py", [base.with_name(f"{part}.py"), *base.parent.glob(f"{part}.*.so")]
            if init.is_file():
                files.append(init)
            elif module := next(filter(Path.is_file, modules), None):
                return [*files, module]
            elif not base.is_dir():
                break
        if files:
            return files
    return []


def _imported(file: Path, places: Iterable[Path]) -> Iterator[str]:
    """Yield the modules that a source file imports, and the names that it imports of them, which may be modules."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # the run's own check imports it, and says what is wrong
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package: list[str] = []
            if node.level:
                around = file.parents[node.level - 1]
                place = next((one for one in places if around.is_relative_to(one)), around)
                package = [*around.relative_to(place).parts]
            module = ".".join([*package, *filter(None, [node.module])])
            names = [".".join(filter(None, [module, alias.name])) for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] not in PACKAGES)


def _is_installed(top: str, places: Sequence[Path]) -> bool:
    """Return whether a package is found elsewhere than in these places, which the cluster's machines do not have."""
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    found = Path(spec.origin or next(iter(spec.submodule_search_locations or ()), ""))
    root = found.parents[1] if found.name == "__init__.py" else found.parent
    return root.resolve() not in places
