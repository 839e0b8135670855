"""The built wheel: it holds every file that the packages need, and its command works without the source tree."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The unpacked wheel."""
    source, built, site = (tmp_path_factory.mktemp(name) for name in ("source", "built", "site"))
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "agentflow.py",
        *(one for one in PACKAGES if "." not in one),
    ):
        # A link is enough, and what a build writes stays out of the tree.
        (source / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=source, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_wheel_holds_every_file_of_its_packages(site):
    folders = [package for package in PACKAGES if "." not in package]
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True)
    missing = [name for name in tracked.stdout.splitlines() if not (site / name).exists()]
    assert missing == []


def test_command_of_the_wheel_checks_the_demo_far_from_the_source(site, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(site)}
    run = (
        "import sys, agentflow, configs; assert configs.__file__.startswith(sys.argv.pop()); sys.exit(agentflow.main())"
    )
    command = [sys.executable, "-c", run, "check", "demo_cpu", str(site)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1][:2]) == (0, "OK"), done.stderr
