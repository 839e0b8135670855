"""The public package name: `agentflow.learner.losses` is the module `learner.losses`, installed at the top level."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

__path__: list[str] = []


def _packages() -> tuple[str, ...]:
    check_names(("configs",))
    from configs import PACKAGES

    return PACKAGES


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import `agentflow.X` as the module X, so that each class has one identity under both names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        real = fullname.removeprefix(f"{__name__}.")
        if real == fullname or real.partition(".")[0] not in _packages():
            return None
        check_names(_packages())
        if importlib.util.find_spec(real) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name.removeprefix(f"{__name__}."))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module was executed under its real name; give it its own spec back.
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state


def check_names(packages: Sequence[str]) -> None:
    """Raise ImportError if another package on the path hides one of these, before a mixture of both is imported."""
    home = Path(__file__).resolve().parent
    for name in packages:
        spec = importlib.util.find_spec(name)
        places = [Path(place).resolve() for place in (spec and spec.submodule_search_locations) or ()]
        if home / name not in places:
            other = spec.origin if spec else "nothing"
            raise ImportError(
                f"agentflow needs its package '{name}' in {home}, but Python finds {other}; rename the other package, "
                "remove its folder from PYTHONPATH, or start in another folder"
            )


def main() -> int:
    """Run the `agentflow` command and return its exit code."""
    try:
        check_names(_packages())
    except ImportError as error:
        print(f"agentflow: error: {error}", file=sys.stderr)
        return 2
    from ray_jobs.cli import main as command

    return command()


# Python's own finder would import the submodules a second time under their public name.
sys.meta_path.insert(0, _SubmoduleFinder())
