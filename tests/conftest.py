"""Where the tests' doubles are, and which tests run beside each other."""

import sys
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

# Scripted doubles live beside the tests that use them.
for room in ("envs", "rollout", "learner", "actors", "ray_jobs"):
    sys.path.insert(0, str(Path(__file__).parent / room))


class Scheduling(LoadScopeScheduling):
    """The files that need Ray, the model or the engine are one part, which one process works off, so that each of them
    is started once and there is memory for it; any other file is a part of its own. The mark `xdist_group` cannot say
    so: xdist 3.8 ignores it under pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "machine" if _needs_the_machine(self.config.rootpath / file) else file


@cache
def _needs_the_machine(file: Path) -> bool:
    text = file.read_text()
    return "pytest.mark.ray" in text or "pytest.mark.slow" in text


def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)
