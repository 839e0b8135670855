"""Where the tests' doubles are, and which tests run beside each other."""

import os
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# Two processes of tests share the cores: threads that wait must soon sleep, as in a run (`ray_jobs/run/resources.py`).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ["CC"] = os.environ["CXX"] = "none"  # engines and learners on a CPU compile nothing

# An example may meet a gap in scheduling.
settings.register_profile("suite", settings(), deadline=None)
settings.load_profile("suite")

# Scripted doubles live beside the tests that use them.
for room in ("envs", "rollout", "learner", "actors", "ray_jobs"):
    sys.path.insert(0, str(Path(__file__).parent / room))


# What has slow tests and needs neither Ray nor vLLM, or starts whole runs: a part of its own, so that the long ones are
# shorter.
APART = {
    "tests/benchmarks/test_endpoint_audit.py",
    "tests/faults/test_real_run.py",
    "tests/learner/test_data_parallel.py",
    "tests/ray_jobs/test_export.py",
    "tests/ray_jobs/test_plan.py",
    "tests/ray_jobs/test_planted_keys.py",
}
LONG = ("ray", "engine")


class Scheduling(LoadScopeScheduling):
    """The files that need Ray are one part and those that need only the engine another one, so that one process starts
    each of them once; any other file is a part of its own. The mark `xdist_group` cannot say so: xdist 3.8 ignores it
    under pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid, self.config.rootpath)


def part_of(nodeid, root):
    file = nodeid.partition("::")[0]
    return file if file in APART else _long_part(root / file) or file


@cache
def _long_part(file: Path) -> str | None:
    text = file.read_text()
    if "pytest.mark.ray" in text:
        return "ray"
    return "engine" if "pytest.mark.slow" in text else None


def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Where two processes share the tests, each begins with a long part, then come the files with the most tests: the
    last ones are short, and neither process waits long for the other. xdist goes by the number of tests alone."""
    if not hasattr(config, "workerinput"):
        return
    parts = [part_of(item.nodeid, config.rootpath) for item in items]
    sizes = Counter(parts)
    order = sorted(range(len(items)), key=lambda at: (parts[at] not in LONG, -sizes[parts[at]]))
    items[:] = [items[at] for at in order]
