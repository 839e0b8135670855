import re
from pathlib import Path

import pytest

from ray_jobs.checks import doctor

ROOT = Path(__file__).parents[2]


def machine():
    return {finding.what: finding for finding in doctor._machine()}


@pytest.mark.parametrize("compiler", ["no-such-compiler", "/no/such/compiler"])
def test_a_compiler_that_is_not_there_is_a_failure(compiler, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    assert machine()["C++ compiler"].state == "fail"
    monkeypatch.setenv("CXX", "sh")
    assert machine()["C++ compiler"].state == "ok"


def test_another_system_is_a_failure_and_a_small_disk_or_memory_a_warning(monkeypatch):
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**29}))
    monkeypatch.setattr(doctor.os, "sysconf", lambda name: 2**16)
    found = machine()
    states = {what: found[what].state for what in ("system", "disk", "memory")}
    assert states == {"system": "fail", "disk": "warn", "memory": "warn"}


def test_setup_doctor_and_the_page_ask_for_the_same():
    setup = (ROOT / ".ci" / "setup").read_text()
    [needed] = re.findall(r"memory_needed=(\d+)", setup)
    [disk] = re.findall(r"local needed=(\d+)", setup)
    assert int(needed) == doctor.MIN_MEMORY_GIB
    page = " ".join((ROOT / "docs" / "first-run.md").read_text().split())
    for said in ("C++ compiler", f"{needed} GiB of memory", f"{disk} GiB of disk"):
        assert said in page
    assert {"C++ compiler", "memory", "disk", "system"} <= machine().keys()
    assert "${CXX:-g++}" in setup
