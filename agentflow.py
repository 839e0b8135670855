"""The one public name: `agentflow.learner.losses` is the module `learner.losses` that the package itself imports.

The packages stand at the top level of the repository, and so do their names where it is installed. Another package of
one of these names that comes first on the path is refused here, in words, before half of each is imported.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PACKAGES = ("configs", "envs", "rollout", "learner", "reward", "actors", "ray_jobs")
__path__: list[str] = []


class _Below(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `agentflow.X` as X, the same object: a class has one identity, whichever name it was imported by."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        real = fullname.removeprefix(f"{__name__}.")
        if real == fullname or real.partition(".")[0] not in PACKAGES:
            return None
        check_names()
        if importlib.util.find_spec(real) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name.removeprefix(f"{__name__}."))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module is whole already, but has the spec of its second name: it gets its own back."""
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state


def check_names() -> None:
    """Raises ImportError where another package hides one of ours."""
    home = Path(__file__).resolve().parent
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        places = [Path(place).resolve() for place in (found and found.submodule_search_locations) or ()]
        if home / name not in places:
            other = found.origin if found else "nothing"
            raise ImportError(
                f"agentflow needs its package '{name}' in {home}, and Python finds {other}; rename that one, or take "
                "its folder off PYTHONPATH or start in another folder"
            )


def main() -> int:
    """The `agentflow` command; returns its exit code."""
    try:
        check_names()
    except ImportError as error:
        print(f"agentflow: error: {error}", file=sys.stderr)
        return 2
    from ray_jobs.cli import main as command

    return command()


# First, or Python's own finder would find the submodules of a package a second time, below its public name.
sys.meta_path.insert(0, _Below())
